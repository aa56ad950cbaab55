"""Generation of answers, greedy or sampled, with a model that trains on packed batches."""

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lit_callbacks.distributed.gather import is_split
from lit_callbacks.protocols import Message
from lit_callbacks.widest_float import widest_float
from peft import PeftModel
from torch import distributed, nn
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from lit_ft.errors import RecipeError
from lit_ft.internals.peft import virtual_tokens_in_answers, virtual_tokens_of
from lit_ft.internals.transformers import attention_implementation, portable_attention
from lit_ft.model.attention.packed_attention import PACKED
from lit_ft.model.config.positions import has_rotary_positions, positions_in
from lit_ft.model.isolation import architectures
from lit_ft.model.render_limits import render_chat
from lit_ft.protocols import FinishReason

SMALLEST_TEMPERATURE = 1e-15
"""Temperature over which logits stay finite in float32, whatever a penalty has made of them."""


def temperature_rule(temperature: float) -> str:
    """What a temperature must be, for a message about one that is not."""
    if 0 < temperature < SMALLEST_TEMPERATURE:
        return f"must be 0 (greedy) or at least {SMALLEST_TEMPERATURE:g}"
    return "must be 0 (greedy) or above" if temperature < 0 else "must be 0 (greedy) or a finite number above"


@dataclass(frozen=True)
class Sampling:
    """How the next token of an answer is chosen; the default is greedy.

    Each row of the data draws from a generator of its own, seeded by ``seed`` and the number of the row. So its answer
    depends neither on the rows that share its batch nor on the number of ranks.
    """

    temperature: float = 0.0
    """Divisor of the logits; 0 is greedy."""
    top_p: float | None = None
    """Draw among the most probable tokens that together have this probability."""
    top_k: int | None = None
    """Draw among this many most probable tokens."""
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            RecipeError: one is out of range, or has no effect.
        """
        if self.temperature != 0 and not SMALLEST_TEMPERATURE <= self.temperature < math.inf:
            raise RecipeError(f"temperature={self.temperature:g} {temperature_rule(self.temperature)}, e.g. 0.7")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise RecipeError(f"top_p={self.top_p:g} must be over 0 and at most 1, e.g. 0.9")
        if self.top_k is not None and self.top_k < 1:
            raise RecipeError(f"top_k={self.top_k} must be 1 token or more, e.g. 50")
        if self.seed < 0:
            raise RecipeError(f"seed={self.seed} must be 0 or more")
        if self.temperature == 0 and (self.top_p or self.top_k or self.seed):
            name = "top_p" if self.top_p else "top_k" if self.top_k else "seed"
            value = getattr(self, name)
            raise RecipeError(
                f"{name}={value:g} has no effect at temperature=0, which is greedy; set temperature, e.g. to 0.7"
            )

    def generators(self, rows: Sequence[int]) -> list[np.random.Generator]:
        """Random number generator of each row, from its number."""
        return [np.random.default_rng([self.seed, row]) for row in rows]

    def processors(self, generators: Sequence[np.random.Generator]) -> LogitsProcessorList:
        """Processors of logits after which the largest one is the drawn token; none if this is greedy."""
        if self.temperature == 0:
            return LogitsProcessorList()
        steps: list[LogitsProcessor] = [TemperatureLogitsWarper(self.temperature)]
        steps += [TopKLogitsWarper(self.top_k)] if self.top_k is not None else []
        steps += [TopPLogitsWarper(self.top_p)] if self.top_p is not None else []
        return LogitsProcessorList([*steps, SeededDraw(generators)])


GREEDY = Sampling()


class SeededDraw(LogitsProcessor):
    """Draw one token for each row, and leave only its logit finite.

    transformers draws all rows of a batch from one generator, so an answer would depend on its batch. One uniform
    number per row and token is drawn on the CPU, and inverts the cumulative probabilities.
    """

    def __init__(self, generators: Sequence[np.random.Generator]) -> None:
        self._generators = generators

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Logits ``(rows, vocabulary)`` with all but the drawn token's at minus infinity."""
        cumulative = scores.to(widest_float(scores.device)).softmax(-1).cumsum(-1)
        total = cumulative[:, -1:].contiguous()
        uniform = torch.tensor([[generator.random()] for generator in self._generators], dtype=cumulative.dtype)
        drawn = torch.searchsorted(cumulative, uniform.to(total.device) * total, right=True)
        # A product that rounds to the total, or above, is beyond all tokens: the last one of a probability over 0.
        drawn = torch.minimum(drawn, torch.searchsorted(cumulative, total))
        return torch.full_like(scores, -torch.inf).scatter(-1, drawn, 0.0)  # type: ignore[return-value]


def dense_implementation(model: PreTrainedModel) -> str:
    """Attention implementation for padded batches and a KV cache: the model's own, unless it is the packed one."""
    training = attention_implementation(model.config)
    return portable_attention(model) if training == PACKED else training


@contextmanager
def dense_attention(model: PreTrainedModel) -> Iterator[None]:
    """Context in which the model takes padded batches and a KV cache instead of packed batches."""
    training = attention_implementation(model.config)
    model.set_attn_implementation(dense_implementation(model))
    try:
        yield
    finally:
        model.set_attn_implementation(training)


@contextmanager
def greedy_decoding(model: PreTrainedModel, stops: Sequence[int], pad_token_id: int | None) -> Iterator[None]:
    """Context of greedy decoding, without any sampling, penalty or constraint of the model's ``generation_config``.

    Args:
        model: Hugging Face model; its ``generation_config`` is replaced, because ``generate`` takes from it all values
            that its caller does not set.
        stops: token ids that end an answer.
        pad_token_id: token id that fills answers which end before others.
    """
    given = model.generation_config
    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=list(stops) or None, pad_token_id=pad_token_id, use_cache=given.use_cache
    )
    try:
        yield
    finally:
        model.generation_config = given


def stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids that end an answer: end tokens of model and tokenizer, and those that close a chat template's turns.

    A base model's own end token may never follow a turn of a conversation, because the template uses another one.
    """
    given = model.generation_config.eos_token_id
    stops = [given] if isinstance(given, int) else list(given or [])
    stops += [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    closing = [*closing_tokens(tokenizer), *end_of_call(tokenizer)]
    return list(dict.fromkeys([*stops, *tokenizer.convert_tokens_to_ids(closing)]))


def pad_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Token that fills up prompts and ended answers; one that ends answers where the tokenizer names none."""
    pad: int | None = tokenizer.pad_token_id
    return tokenizer.eos_token_id if pad is None else pad


def closing_tokens(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Special tokens that the chat template writes right after an answer; empty without a chat template."""
    one, (_, closing) = _special_tokens(tokenizer), _around(tokenizer, _ANSWER, _ANSWERED)
    run = re.match(rf"\s*((?:{one})+)", closing)
    return re.findall(one, run.group(1)) if run else []


def end_of_call(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Special token that ends a turn which calls tools, e.g. gpt-oss's ``<|call|>``; empty where there is none.

    A token that closes each of several calls ends no turn.
    """
    _, closing = _around(tokenizer, _CALLS, _CALLED)
    last = re.search(rf"({_special_tokens(tokenizer)})\s*\Z", closing)
    return [last[1]] if last and closing.count(last[1]) == 1 else []


def has_marks(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether an answer or a tool call begins with special tokens, e.g. gpt-oss's ``<|channel|>final<|message|>``."""
    openings = _around(tokenizer, _ANSWER, _ANSWERED)[0], _around(tokenizer, _CALLS, _CALLED)[0]
    return any(re.search(_special_tokens(tokenizer), opening) for opening in openings)


_ANSWERED, _CALLED = "probe answer", "probe_call"
_CALL = {"type": "function", "function": {"name": _CALLED, "arguments": {"probe": "value"}}}
_ANSWER: Message = {"role": "assistant", "content": _ANSWERED}
_CALLS: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{**_CALL, "id": "call00001"}, {**_CALL, "id": "call00002"}],
}


def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> str:
    """Pattern of any special token."""
    special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    return "|".join(map(re.escape, sorted(special, key=len, reverse=True))) or "(?!)"


def _around(tokenizer: PreTrainedTokenizerBase, turn: Message, text: str) -> tuple[str, str]:
    """Text that the chat template writes between a prompt and the text of the turn that follows, and after that text.

    Both are empty where the template does not render it.
    """
    if not tokenizer.chat_template:
        return "", ""
    question: Message = {"role": "user", "content": "probe question"}
    try:
        before, middle, closing = render_chat(tokenizer, [question, turn]).partition(text)
        prompt = render_chat(tokenizer, [question], generation=True)
    except RecipeError:
        raise
    except Exception:  # a foreign template may raise anything: then what it writes is unknown
        return "", ""
    if not middle:
        return "", ""
    return before.removeprefix(prompt) if before.startswith(prompt) else "", closing


def prompt_size(prompt: str) -> int:
    """Bytes of a prompt, by which prompts of about one length are answered together: few of their tokens are padding.

    A token has about as many bytes in each language.
    """
    return len(prompt.encode())


class GeneratedAnswer(NamedTuple):
    """Answer to a prompt."""

    text: str
    finish_reason: FinishReason | None
    """None where it is not known: a module with an ``answer`` of its own."""
    ids: Sequence[int] = ()
    """Tokens, with the one that ended it; empty where they are not known."""


@torch.no_grad()
def generate_answers(
    model: PreTrainedModel | PeftModel,
    base: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str] | Sequence[list[int]],
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    rows: Sequence[int] | None = None,
    at_once: int | None = None,
) -> list[GeneratedAnswer]:
    """Answer prompts together, as far as padding changes no answer; an answer ends at any of ``stop_ids``.

    Special tokens are left out of the text, unless the chat template writes them within answers.

    Args:
        model: model that generates: ``base``, or the PEFT model around it.
        base: Hugging Face model.
        tokenizer: tokenizer with a padding or end-of-sequence token.
        prompts: rendered prompts, with special tokens as text and the opening of the assistant's turn; or their tokens.
        max_new_tokens: largest number of tokens of an answer.
        sampling: choice of the next token.
        rows: number of each prompt's row, which seeds its random numbers; None counts the prompts.
        at_once: largest number of prompts that are answered together; None sets no limit.

    Raises:
        RecipeError: a prompt leaves no position for an answer, where a model has learned its positions.
    """
    encoded = [
        tokenizer(prompt, add_special_tokens=False)["input_ids"] if isinstance(prompt, str) else prompt
        for prompt in prompts
    ]
    numbers = rows or range(len(prompts))
    rooms = _rooms(model, base, encoded, max_new_tokens)
    batches = _batches(base, encoded, [room < max_new_tokens for room in rooms], at_once)
    answers: dict[int, tuple[list[int], FinishReason]] = {}
    was_training = model.training
    model.eval()
    try:
        for batch in batches:
            # A rank without prompts answers a dummy prompt: the other ranks need its shards of the weights.
            own = [encoded[index] for index in batch] or [tokenizer(".", add_special_tokens=False)["input_ids"]]
            processors = sampling.processors(sampling.generators([numbers[index] for index in batch] or [0]))
            most = _common_room(base, [rooms[index] for index in batch], max_new_tokens)
            answers |= zip(batch, _generate(model, base, tokenizer, own, most, processors), strict=False)
    finally:
        model.train(was_training)
    ids, ends = zip(*(answers[index] for index in range(len(prompts))), strict=True) if prompts else ((), ())
    before_end = [one[:-1] if end == "stop" else one for one, end in zip(ids, ends, strict=True)]
    decoded = tokenizer.batch_decode(before_end, skip_special_tokens=not has_marks(tokenizer))
    return [GeneratedAnswer(*answer) for answer in zip(decoded, ends, ids, strict=True)]


def _rooms(model: nn.Module, base: PreTrainedModel, encoded: Sequence[Sequence[int]], max_new_tokens: int) -> list[int]:
    """Largest number of tokens of each answer: fewer than are asked for where learned positions end before.

    Raises:
        RecipeError: a prompt leaves no position.
    """
    limit = _last_position(base.config)
    if limit is None:
        return [max_new_tokens] * len(encoded)
    rooms = [limit - virtual_tokens_of(model) - len(ids) for ids in encoded]
    if min(rooms, default=1) < 1:
        raise RecipeError(
            f"a prompt of {max(map(len, encoded)):,} tokens leaves none of the {limit:,} positions of the model for an "
            "answer; ask less"
        )
    if min(rooms, default=max_new_tokens) < max_new_tokens:
        rank_zero_warn(
            f"answers end at the last of the model's {limit:,} positions where that comes before max_new_tokens="
            f"{max_new_tokens}"
        )
    return [min(room, max_new_tokens) for room in rooms]


def _last_position(config: PretrainedConfig) -> int | None:
    """Number of positions of a model without rotary ones, beyond which it has none; None for other models."""
    return None if has_rotary_positions(config) else positions_in(config)


def _common_room(base: PreTrainedModel, rooms: Sequence[int], max_new_tokens: int) -> int:
    """Largest number of tokens of a batch's answers; a collective where ranks share a model with learned positions.

    Such ranks take as many steps as the longest answer of all, each of which has a position.
    """
    most = min(rooms, default=max_new_tokens)
    if _last_position(base.config) is None or not is_split(base):
        return most
    least = torch.tensor(most, device=base.device)
    distributed.all_reduce(least, distributed.ReduceOp.MIN)
    return int(least)


def _batches(
    base: PreTrainedModel, encoded: Sequence[Sequence[int]], alone: Sequence[bool], at_once: int | None
) -> list[list[int]]:
    """Indices of the prompts that are answered together; a collective where ranks share the model.

    Those of one length, where padding would change the answers or ``alone`` says that positions end before the
    answer; else those of like lengths, where there are more than ``at_once``. Ranks that share a model have as many
    batches.
    """
    by_length: dict[int, list[int]] = {}
    for index, ids in enumerate(encoded):
        is_of_one_length = alone[index] or architectures.reads_padding(base.config)
        by_length.setdefault(len(ids) if is_of_one_length else 0, []).append(index)
    size = at_once or max(len(encoded), 1)
    batches: list[list[int]] = []
    for same in by_length.values():
        by_size = same if len(same) <= size else sorted(same, key=lambda index: -len(encoded[index]))
        batches += [by_size[start : start + size] for start in range(0, len(same), size)]
    if not is_split(base):
        return batches
    most = torch.tensor(len(batches), device=base.device)
    distributed.all_reduce(most, distributed.ReduceOp.MAX)
    return batches + [[]] * (int(most) - len(batches))


def _generate(
    model: PreTrainedModel | PeftModel,
    base: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    processors: LogitsProcessorList,
) -> list[tuple[list[int], FinishReason]]:
    """Tokens of the answers to a left-padded batch of prompts, and what ended each."""
    padding = pad_id(tokenizer)
    longest = max(map(len, prompts))
    input_ids = torch.tensor([[padding] * (longest - len(ids)) + ids for ids in prompts], device=base.device)
    mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts], device=base.device)
    stops = stop_ids(base, tokenizer)
    with dense_attention(base), greedy_decoding(base, stops, padding), virtual_tokens_in_answers(model):
        generated = model.generate(
            input_ids=input_ids,
            attention_mask=mask,
            max_new_tokens=max_new_tokens,
            synced_gpus=is_split(base),
            logits_processor=processors,
        )
    return [_ended(ids, stops) for ids in generated[:, longest:].tolist()]


def _ended(ids: list[int], stops: Sequence[int]) -> tuple[list[int], FinishReason]:
    """Tokens of an answer to the first that ends it; all of them if none does."""
    end = next((index for index, token in enumerate(ids) if token in stops), None)
    return (ids, "length") if end is None else (ids[: end + 1], "stop")
