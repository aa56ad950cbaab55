"""Answers of one conversation as a stream of text that can be stopped."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Literal

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from lit_ft.errors import RecipeError
from lit_ft.inference.opening import OpenedModel
from lit_ft.internals.peft import virtual_tokens_in_answers, virtual_tokens_of
from lit_ft.model.config.positions import positions_in
from lit_ft.model.generation import SMALLEST_TEMPERATURE, pad_id, stop_ids, temperature_rule


@dataclass(frozen=True)
class Decoding:
    """How answers are generated; None takes the value of the model's ``generation_config.json``."""

    max_new_tokens: int = 1024
    """Largest number of tokens of an answer."""
    temperature: float | None = None
    """Divisor of the logits; 0 always takes the most probable token."""
    top_p: float | None = None
    """Draw among the most probable tokens that together have this probability."""
    top_k: int | None = None
    """Draw among this many most probable tokens."""
    repetition_penalty: float | None = None
    """Divisor of the logits of tokens that are there already; 1 is none."""
    seed: int | None = None
    """Seed of the draws of each answer; None draws anew each time."""
    min_p: float | None = None
    """Draw among the tokens with at least this part of the most probable one's probability; 0 is all."""

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            RecipeError: one is out of range.
        """
        rules = {
            "max_new_tokens": (self.max_new_tokens >= 1, "must be 1 token or more"),
            "temperature": (
                self.temperature in (None, 0) or SMALLEST_TEMPERATURE <= self.temperature < float("inf"),
                temperature_rule(self.temperature or 0),
            ),
            "top_p": (self.top_p is None or 0 < self.top_p <= 1, "must be over 0 and at most 1"),
            "min_p": (self.min_p is None or 0 <= self.min_p <= 1, "must be from 0 (all tokens) to 1"),
            "top_k": (self.top_k is None or self.top_k >= 0, "must be 0 (no limit) or more"),
            "repetition_penalty": (
                self.repetition_penalty is None or 1e-15 <= self.repetition_penalty <= 1e15,
                "must be from 1e-15 to 1e15; 1 is none",
            ),
            "seed": (self.seed is None or 0 <= self.seed < 2**63, "must be 0 or more, and below 2**63"),
        }
        for name, (holds, rule) in rules.items():
            if not holds:
                raise RecipeError(f"{name}={getattr(self, name)} {rule}")

    def changed(self, name: str, value: str) -> "Decoding":
        """Copy with one value, given as text; ``default`` takes the model's own.

        Raises:
            RecipeError: the name or the value is none.
        """
        kinds = {field.name: float if "float" in str(field.type) else int for field in fields(self)}
        if name not in kinds:
            raise RecipeError(f"{name!r} is no setting; there are {', '.join(kinds)}")
        try:
            new = getattr(Decoding(), name) if value == "default" else kinds[name](value)
        except ValueError:
            raise RecipeError(
                f"{name}={value!r} is no {'number' if kinds[name] is float else 'whole number'}"
            ) from None
        return Decoding(**{**asdict(self), name: new})

    def generation_config(self, opened: OpenedModel) -> GenerationConfig:
        """Generation config of a model with these values in place of its own."""
        own = opened.base.generation_config
        given = {
            name: value
            for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
            if (value := getattr(self, name)) is not None
        }
        kept = ("do_sample", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "no_repeat_ngram_size")
        values = {name: value for name in kept if (value := getattr(own, name, None)) is not None} | given
        is_drawn = values.get("do_sample", False) if self.temperature is None else self.temperature > 0
        if not is_drawn:
            values = {name: values[name] for name in ("repetition_penalty", "no_repeat_ngram_size") if name in values}
        tokenizer = opened.tokenizer
        return GenerationConfig(
            **{**values, "do_sample": is_drawn},
            max_new_tokens=self.max_new_tokens,
            eos_token_id=stop_ids(opened.base, tokenizer) or None,
            pad_token_id=pad_id(tokenizer),
        )

    def describe(self, opened: OpenedModel) -> str:
        """Line about how a model's answers are generated, with values of its own included."""
        config = self.generation_config(opened)
        drawn = ("temperature", "top_p", "top_k", "min_p") if config.do_sample else ()
        names = [name for name in (*drawn, "repetition_penalty") if getattr(config, name, None) not in (None, 1.0)]
        values = "".join(f", {name} {getattr(config, name):g}" for name in names)
        return f"{'sampled' if config.do_sample else 'greedy'}{values}, up to {self.max_new_tokens:,} tokens"


@dataclass(frozen=True)
class StreamedAnswer:
    """A generated answer."""

    text: str
    """Without the tokens that end a turn."""
    ids: tuple[int, ...]
    """Tokens, those that end a turn included."""
    seconds: float
    ended: Literal["stop", "length", "cancelled"]
    """By the model's end of turn, at ``max_new_tokens`` or the model's last position, or by the caller."""

    @property
    def tokens(self) -> int:
        """Number of generated tokens."""
        return len(self.ids)


class _NewTokens(BaseStreamer):
    """Streamer that hands on the new tokens, without the prompt's."""

    def __init__(self, take: Callable[[list[int]], object]) -> None:
        self._take, self._is_prompt = take, True

    def put(self, value: torch.Tensor) -> None:
        """Take tokens, ``(tokens,)``; the first call is the prompt's."""
        if self._is_prompt:
            self._is_prompt = False
        else:
            self._take(value.tolist())

    def end(self) -> None:
        """End the answer."""


class TextPieces:
    """Text of tokens that come one by one, in pieces of complete characters.

    transformers' ``TextStreamer`` keeps symbols until the next space: a stop text would be found tokens too late.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        # Tokens are decoded behind those of the last piece: some decoders leave out a space at the beginning.
        self._before: list[int] = []
        self._waiting: list[int] = []

    def add(self, token: int) -> str:
        """Add a token; returns the text that is complete with it, if any."""
        self._waiting.append(token)
        text = self.rest()
        if not text or text.endswith("\ufffd"):  # stands for a part of a character
            return ""
        self._before, self._waiting = self._waiting, []
        return text

    def rest(self) -> str:
        """Text of the tokens that no piece has; its last character may not be complete."""
        known = self._tokenizer.decode(self._before)
        return str(self._tokenizer.decode(self._before + self._waiting))[len(known) :]


class AnswerText:
    """Text of an answer, handed on as soon as its characters are complete, without the tokens that end a turn."""

    def __init__(self, opened: OpenedModel, stops: set[int], show: Callable[[str], object]) -> None:
        self._pieces, self._stops, self._show = TextPieces(opened.tokenizer), stops, show
        self.ids: list[int] = []

    def add(self, tokens: Sequence[int]) -> None:
        """Add new tokens."""
        self.ids += tokens
        for token in tokens:
            if token not in self._stops and (text := self._pieces.add(token)):
                self._show(text)

    def end(self) -> None:
        """End the answer; hands on what is left."""
        if text := self._pieces.rest():
            self._show(text)


class _Cancelled(StoppingCriteria):
    """Stop when the caller says so."""

    def __init__(self, is_cancelled: Callable[[], bool]) -> None:
        self._is_cancelled = is_cancelled

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **_: object) -> torch.BoolTensor:
        return torch.full((len(input_ids),), self._is_cancelled(), device=input_ids.device)  # type: ignore[return-value]


@torch.no_grad()
def stream_answer(
    opened: OpenedModel,
    prompt: str,
    decoding: Decoding,
    show: Callable[[str], None],
    is_cancelled: Callable[[], bool] = lambda: False,
) -> StreamedAnswer:
    """Answer one rendered prompt.

    Args:
        opened: model that answers.
        prompt: rendered prompt, with special tokens as text and the opening of the assistant's turn.
        decoding: how tokens are chosen.
        show: takes each piece of the answer as soon as it is complete.
        is_cancelled: asked after each token whether to stop.

    Raises:
        RecipeError: the prompt leaves no position for an answer.
    """
    # verbose would warn of a prompt beyond the model's positions, which is refused.
    ids = opened.tokenizer(prompt, add_special_tokens=False, verbose=False)["input_ids"]
    room = positions(opened) - len(ids)
    if room < 1:
        raise RecipeError(
            f"the conversation has {len(ids):,} tokens, and the model {positions(opened):,} positions; ask less, or in "
            "a terminal take back a turn with /undo"
        )
    config = replace(decoding, max_new_tokens=min(decoding.max_new_tokens, room)).generation_config(opened)
    stops = set(config.eos_token_id or [])
    pieces: list[str] = []

    def take(piece: str) -> None:
        pieces.append(piece)
        show(piece)

    text, began = AnswerText(opened, stops, take), time.perf_counter()
    if decoding.seed is not None:
        torch.manual_seed(decoding.seed)
    stream_tokens(opened, ids, config, text.add, is_cancelled)
    text.end()
    ended: Literal["stop", "length", "cancelled"] = "stop" if stops.intersection(text.ids[-1:]) else "length"
    if ended == "length" and is_cancelled():
        ended = "cancelled"
    return StreamedAnswer("".join(pieces), tuple(text.ids), time.perf_counter() - began, ended)


@torch.no_grad()
def stream_tokens(
    opened: OpenedModel,
    ids: Sequence[int],
    config: GenerationConfig,
    take: Callable[[list[int]], object],
    is_cancelled: Callable[[], bool] = lambda: False,
    choice: LogitsProcessor | None = None,
) -> None:
    """Generate after one prompt's tokens.

    Args:
        opened: model that answers.
        ids: tokens of the prompt.
        config: how tokens are chosen, and which ones end the answer.
        take: is called with the new tokens of each step.
        is_cancelled: asked after each token whether to stop.
        choice: changes the logits of each step, before what ``config`` asks for.
    """
    prompt = torch.tensor([list(ids)], device=opened.base.device)
    given, opened.base.generation_config = opened.base.generation_config, config
    try:
        with virtual_tokens_in_answers(opened.model):
            opened.model.generate(
                input_ids=prompt,
                attention_mask=torch.ones_like(prompt),
                streamer=_NewTokens(take),
                stopping_criteria=StoppingCriteriaList([_Cancelled(is_cancelled)]),
                logits_processor=LogitsProcessorList([] if choice is None else [choice]),
            )
    finally:
        opened.base.generation_config = given


def positions(opened: OpenedModel) -> int:
    """Largest number of tokens of a prompt and its answer."""
    limit = positions_in(opened.base.config)
    return 2**31 if limit is None else limit - virtual_tokens_of(opened.model)
