"""Generation of answers, greedy or sampled, with a model that trains on packed batches."""

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from lit_callbacks.distributed.gather import is_split
from peft import PeftModel
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from lit_ft.errors import RecipeError
from lit_ft.internals.transformers import attention_implementation
from lit_ft.model.packed_attention import PACKED
from lit_ft.model.render_limits import render_chat


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
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise RecipeError(f"temperature={self.temperature:g} must be 0 (greedy) or more, e.g. 0.7")
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
        cumulative = scores.double().softmax(-1).cumsum(-1)
        uniform = torch.tensor([[generator.random()] for generator in self._generators]).to(cumulative)
        drawn = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
        drawn = drawn.clamp(max=scores.shape[-1] - 1)
        return torch.full_like(scores, -torch.inf).scatter(-1, drawn, 0.0)  # type: ignore[return-value]


def dense_implementation(model: PreTrainedModel) -> str:
    """Attention implementation for padded batches and a KV cache: the model's own, unless it is the packed one."""
    training = attention_implementation(model.config)
    return "sdpa" if training == PACKED else training


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
    """Token ids that end an answer: end tokens of model and tokenizer, and those that close a chat template's turn.

    A base model's own end token may never follow a turn of a conversation, because the template uses another one.
    """
    given = model.generation_config.eos_token_id
    stops = [given] if isinstance(given, int) else list(given or [])
    stops += [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return list(dict.fromkeys([*stops, *tokenizer.convert_tokens_to_ids(closing_tokens(tokenizer))]))


def closing_tokens(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Special tokens that the chat template writes right after an answer; empty without a chat template."""
    if not tokenizer.chat_template:
        return []
    answer = "probe answer"
    turns = [{"role": "user", "content": "probe question"}, {"role": "assistant", "content": answer}]
    try:
        closing = render_chat(tokenizer, turns).rpartition(answer)[2]
    except RecipeError:
        raise
    except Exception:  # a foreign template may raise anything: then the end of its answers is unknown
        return []
    special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    one = "|".join(map(re.escape, sorted(special, key=len, reverse=True))) or "(?!)"
    run = re.match(rf"\s*((?:{one})+)", closing)
    return re.findall(one, run.group(1)) if run else []


@torch.no_grad()
def generate_answers(
    model: PreTrainedModel | PeftModel,
    base: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    rows: Sequence[int] | None = None,
) -> list[str]:
    """Answer prompts as one left-padded batch; an answer ends at any of ``stop_ids``.

    Args:
        model: model that generates: ``base``, or the PEFT model around it.
        base: Hugging Face model.
        tokenizer: tokenizer with a padding or end-of-sequence token.
        prompts: rendered prompts, with special tokens as text and the opening of the assistant's turn.
        max_new_tokens: largest number of tokens of an answer.
        sampling: choice of the next token.
        rows: number of each prompt's row, which seeds its random numbers; None counts the prompts.
    """
    lockstep = is_split(base)
    if not prompts and not lockstep:
        return []
    pad_token_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    # A rank without prompts answers a dummy prompt: the other ranks need its shards of the weights.
    encoded = [tokenizer(prompt, add_special_tokens=False)["input_ids"] for prompt in prompts or ["."]]
    longest = max(map(len, encoded))
    input_ids = torch.tensor([[pad_token_id] * (longest - len(ids)) + ids for ids in encoded], device=base.device)
    mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in encoded], device=base.device)
    was_training = model.training
    model.eval()
    with dense_attention(base), greedy_decoding(base, stop_ids(base, tokenizer), pad_token_id):
        generated = model.generate(
            input_ids=input_ids,
            attention_mask=mask,
            max_new_tokens=max_new_tokens,
            synced_gpus=lockstep,
            logits_processor=sampling.processors(sampling.generators(rows or range(len(encoded)))),
        )
    model.train(was_training)
    return [tokenizer.decode(ids, skip_special_tokens=True) for ids in generated[: len(prompts), longest:]]
