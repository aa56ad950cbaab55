"""Answers of several requests at once: transformers' continuous batching, or one at a time where it does not apply."""

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, LogitsProcessorList
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessor
from transformers.generation.continuous_batching.requests import FutureRequestState, GenerationOutput

from lit_ft.inference.opening import OpenedModel
from lit_ft.inference.text_stream import stream_tokens
from lit_ft.inference.token_choice import TokenChoice, TokenLogprob, logprobs_of
from lit_ft.internals.transformers import attention_implementation, one_forward_at_a_time, takes_any_attention
from lit_ft.model.architecture import Architecture
from lit_ft.model.generation import pad_id

PAGE_TOKENS = 32
"""Tokens of a page of the KV cache; a sequence wastes half a page on average."""
BATCH_TOKENS = 512
"""Largest number of tokens of one forward pass; longer prompts take several."""

STOPPED = "the server stops"


class Unavailable(RuntimeError):
    """The server generates no more; another one, or the same one started again, would."""


@dataclass
class Generation:
    """One answer that is being generated; made and read on the event loop's thread."""

    id: str
    prompt: list[int]
    max_tokens: int
    stops: list[int]
    """Tokens that end the answer."""
    choice: TokenChoice
    is_cancelled: bool = False
    _events: "asyncio.Queue[list[int] | RuntimeError | None]" = field(default_factory=asyncio.Queue)

    def push(self, tokens: list[int]) -> None:
        """Hand on new tokens."""
        self._events.put_nowait(tokens)

    def end(self, error: RuntimeError | None = None) -> None:
        """End the answer, with an error if there was one."""
        self._events.put_nowait(error)

    async def tokens(self) -> AsyncIterator[list[int]]:
        """New tokens, as soon as there are any.

        Raises:
            RuntimeError: generation failed.
            Unavailable: the server stops, or has stopped to generate.
        """
        while (event := await self._events.get()) is not None:
            if isinstance(event, RuntimeError):
                raise event
            yield event


class Engine(Protocol):
    """Generator of one model's answers."""

    opened: OpenedModel

    def submit(self, generation: Generation) -> None:
        """Begin an answer, on the event loop's thread."""

    def cancel(self, generation: Generation) -> None:
        """End an answer early, and free what it holds."""

    def is_alive(self) -> bool:
        """Whether answers can be generated."""

    def end_answers(self) -> None:
        """End all answers with an error, on the event loop's thread, because the server stops."""

    def stop(self) -> None:
        """End the engine's thread, and all answers."""


def batching_obstacle(opened: OpenedModel) -> str | None:
    """Reason why continuous batching cannot run a model; None if it can."""
    config = opened.base.config.get_text_config()
    layers = set(getattr(config, "layer_types", None) or []) - {"full_attention", "sliding_attention"}
    method = next(iter(opened.model.peft_config.values())) if opened.is_adapted else None
    attention = attention_implementation(opened.base.config)
    if layers or not takes_any_attention(opened.base):
        return f"layers other than attention ({', '.join(sorted(layers)) or config.model_type})"
    if method is not None and (method.is_prompt_learning or method.peft_type.value == "ADAPTION_PROMPT"):
        return f"{method.peft_type.value} adds virtual tokens"
    if attention != "sdpa":
        return f"attention is {attention}"
    return None


def start_engine(opened: OpenedModel, cache_tokens: int, max_requests: int) -> Engine:
    """Start the engine that fits a model.

    Args:
        opened: model that answers.
        cache_tokens: number of tokens that the KV cache holds, of all answers together.
        max_requests: largest number of answers at once.
    """
    if batching_obstacle(opened) is not None:
        return SequentialEngine(opened)
    return BatchedEngine(opened, cache_tokens, max_requests)


def cache_tokens_in(opened: OpenedModel, cache_gib: float) -> int:
    """Number of tokens that a KV cache holds.

    Args:
        opened: model that answers.
        cache_gib: size of the cache, in GiB.
    """
    config = opened.base.config
    layers, model = config.get_text_config().num_hidden_layers, Architecture.of(config)
    page_bytes = 2 * layers * model.kv_heads * model.head_dim * PAGE_TOKENS * opened.base.dtype.itemsize
    return int(cache_gib * 2**30 / page_bytes) * PAGE_TOKENS


def score(opened: OpenedModel, ids: Sequence[int], top: int) -> list[TokenLogprob]:
    """Log-probabilities of each of a sequence's tokens but the first, which nothing predicts."""
    tokens = torch.tensor([list(ids)], device=opened.base.device)
    with torch.no_grad():
        logits = opened.model(input_ids=tokens, use_cache=False).logits[0]
    # Virtual tokens of prompt tuning and P-tuning have logits of their own, before the others.
    return logprobs_of(logits[-len(ids) : -1], tokens[0, 1:], top)


class _ChosenByRequest(ContinuousBatchingLogitsProcessor):
    """Processor of a batch's logits that gives each row to the choice of its request."""

    supported_kwargs: dict[str, type] = {}  # noqa: RUF012 (declared so by transformers)
    ignored_kwargs: tuple[str, ...] = ()

    def __init__(self, running: dict[str, Generation]) -> None:
        self._running = running
        self._rows: list[TokenChoice | None] = []

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: list[FutureRequestState]) -> torch.Tensor:
        # Called right before the forward pass whose logits follow: batches do not overlap (use_async_batching=False).
        generations = [self._running.get(request.state.request_id) for request in requests_with_new_token]
        self._rows = [None if generation is None else generation.choice for generation in generations]
        return torch.zeros(len(generations), dtype=torch.int32)

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        for row, choice in enumerate(self._rows):
            if choice is not None and not choice.changes_nothing:
                scores[row : row + 1] = choice(None, scores[row : row + 1])  # type: ignore[arg-type]
        return scores


class BatchedEngine:
    """Engine over transformers' continuous batching."""

    def __init__(self, opened: OpenedModel, cache_tokens: int, max_requests: int) -> None:
        self.opened = opened
        self._running: dict[str, Generation] = {}
        cache = ContinuousBatchingConfig(
            page_size=PAGE_TOKENS,
            num_blocks=cache_tokens // PAGE_TOKENS,
            max_batch_tokens=BATCH_TOKENS,
            max_requests_per_batch=min(max_requests, BATCH_TOKENS),
            auto_switch_to_flash=False,  # other kernels would give other tokens than `chat` and `predict`
            use_async_batching=False,
            use_cuda_graph=False,
            per_request_processors=True,
        )
        config = GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=1)
        self._manager = opened.base.init_continuous_batching(config, cache)
        processors = self._manager.logit_processor
        processors.logits_processor = LogitsProcessorList([_ChosenByRequest(self._running)])
        processors.tensors_required, processors.do_processing = 1, True
        one_forward_at_a_time(opened.base)  # `score` runs on another thread
        self._manager.start()

    def submit(self, generation: Generation) -> None:
        """Begin an answer, on the event loop's thread."""
        self._running[generation.id] = generation
        sent = 0

        def take(output: GenerationOutput) -> None:
            nonlocal sent
            if new := output.generated_tokens[sent:]:
                sent += len(new)
                generation.push(new)
            if output.is_finished():
                self._running.pop(generation.id, None)
                generation.end(None if output.error is None else RuntimeError(output.error))

        self._manager.register_result_handler(generation.id, take)
        added = self._manager.add_request(
            generation.prompt,
            generation.id,
            max_new_tokens=generation.max_tokens,
            streaming=True,
            eos_token_id=generation.stops or -1,
        )
        if added is None:
            generation.end(Unavailable("generation has ended after an earlier error; start the server again"))

    def cancel(self, generation: Generation) -> None:
        """End an answer early, and free its part of the cache."""
        if self._running.pop(generation.id, None) is not None:
            self._manager.cancel_request(generation.id)
            self._manager.output_router.result_handlers.pop(generation.id, None)

    def is_alive(self) -> bool:
        """Whether the thread that generates runs."""
        return bool(self._manager.is_running())

    def end_answers(self) -> None:
        """End all answers with an error, on the event loop's thread, because the server stops."""
        for generation in list(self._running.values()):
            self.cancel(generation)
            generation.end(Unavailable(STOPPED))

    def stop(self) -> None:
        """End the engine's thread, and all answers."""
        self._manager.stop(block=True, timeout=10, hard_stop=True)


class SequentialEngine:
    """Engine that generates one answer after the other."""

    def __init__(self, opened: OpenedModel) -> None:
        self.opened = opened
        self._queue: queue.Queue[tuple[Generation, asyncio.AbstractEventLoop] | None] = queue.Queue()
        self._is_stopped = False
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def submit(self, generation: Generation) -> None:
        """Queue an answer, on the event loop's thread."""
        self._queue.put((generation, asyncio.get_running_loop()))

    def cancel(self, generation: Generation) -> None:
        """End an answer early."""
        generation.is_cancelled = True

    def is_alive(self) -> bool:
        """Whether the thread that generates runs."""
        return self._thread.is_alive()

    def end_answers(self) -> None:
        """End all answers with an error, because the server stops."""
        self._is_stopped = True

    def stop(self) -> None:
        """End the engine's thread, and all answers."""
        self._is_stopped = True
        self._queue.put(None)
        self._thread.join(10)

    def _work(self) -> None:
        while (task := self._queue.get()) is not None:
            generation, loop = task

            say = partial(_call_on, loop)
            try:
                self._generate(generation, partial(say, generation.push))
                say(generation.end, Unavailable(STOPPED) if self._is_stopped else None)
            except Exception as error:  # must reach the client that waits, and leave the thread to the next one
                say(generation.end, RuntimeError(f"{type(error).__name__}: {error}"))

    def _generate(self, generation: Generation, take: Callable[[list[int]], None]) -> None:
        def is_cancelled() -> bool:
            return generation.is_cancelled or self._is_stopped

        if is_cancelled():
            return
        config = GenerationConfig(
            do_sample=False,
            max_new_tokens=generation.max_tokens,
            eos_token_id=generation.stops or None,
            pad_token_id=pad_id(self.opened.tokenizer),
        )
        stream_tokens(self.opened, generation.prompt, config, take, is_cancelled, generation.choice)


def _call_on(loop: asyncio.AbstractEventLoop, call: Callable[..., None], *values: object) -> None:
    with suppress(RuntimeError):  # the loop is closed: nobody listens any more
        loop.call_soon_threadsafe(call, *values)
