"""Comparison of a run with the server that serves it: prompt tokens, log-probabilities and greedy answers.

The tokens are those that training sees, from the code that renders and encodes training rows. The log-probabilities
and greedy answers are those of the run's own model, for the same tokens; so a template that differs is one finding, not
three.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, TypeVar

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from lit_ft.data.token_difference import decoded_from, first_difference
from lit_ft.errors import RecipeError
from lit_ft.inference.answered_turns import AnsweredTurn
from lit_ft.inference.continuous_batching import score
from lit_ft.inference.openai.client import Lacking, OpenAIClient
from lit_ft.inference.opening import OpenedModel
from lit_ft.inference.text_stream import Decoding, positions, stream_tokens
from lit_ft.model.generation import stop_ids

SERVED_BOUNDS = {"F32": 0.05, "F16": 0.05, "BF16": 0.5, "Q8_0": 0.5}
"""The same where llama.cpp's server names the type of its weights. Beside weights in float32 it keeps keys and values
in float16; Q8_0 has 8 bits, as a bfloat16 does."""

T = TypeVar("T")
Column = Literal["prompt", "logprobs", "greedy"]
COLUMNS: tuple[Column, ...] = ("prompt", "logprobs", "greedy")
BOUNDS = {torch.float32: 0.001, torch.float16: 0.05, torch.bfloat16: 0.5}
"""Largest difference of a token's log-probability that rounding explains, by the dtype of the run's model.

Kernels and batches that differ move a logit by a few units in its last place; a bfloat16 has 8 bits, and logits reach
tens."""


@dataclass
class TurnParity:
    """Comparison of one turn on the server with the run; None in place of values that the server does not give."""

    turn: AnsweredTurn
    served_prompt: list[int] | None = None
    logprob_differences: np.ndarray | None = None
    """Absolute differences, ``(answer tokens,)``."""
    own_greedy: list[int] = field(default_factory=list)
    served_greedy: list[int] | None = None
    is_tie: bool = False
    """Whether the greedy answers part where the run's model finds both tokens equally probable, up to the bound."""

    @property
    def prompt_place(self) -> int:
        """Number of the first prompt token that differs, from 1; 0 if there is none."""
        return 0 if self.served_prompt is None else first_difference(self.turn.prompt, self.served_prompt)

    @property
    def greedy_place(self) -> int:
        """Number of the first token of the greedy answer that differs, from 1; 0 if there is none."""
        return 0 if self.served_greedy is None else first_difference(self.own_greedy, self.served_greedy)

    @property
    def greedy_tokens(self) -> tuple[int, int]:
        """Equal tokens before the greedy answers part, and tokens of the longer one."""
        longest = max(len(self.own_greedy), len(self.served_greedy or []))
        return (self.greedy_place - 1 if self.greedy_place else longest), longest

    def faults(self, bound: float, tokenizer: PreTrainedTokenizerBase) -> list[str]:
        """Messages about what differs more than rounding explains."""
        messages = []
        if at := self.prompt_place:
            trained, served = (decoded_from(at, ids, tokenizer) for ids in (self.turn.prompt, self.served_prompt or []))
            messages.append(
                f"{self.turn.name}: prompt differs at token {at:,}: trained are {trained}, the server has {served}"
            )
        differences = self.logprob_differences
        if differences is not None and not differences.max() <= bound:  # NaN is a fault too
            at = int(np.argmax(differences))  # NaN counts as the largest
            text = tokenizer.decode([self.turn.answer[at]])
            messages.append(
                f"{self.turn.name}: log-probability of answer token {at + 1:,} ({text!r}) differs by "
                f"{differences[at]:.2g}, more than {bound:g}"
            )
        if (at := self.greedy_place) and not self.is_tie:
            own, served = (decoded_from(at, ids, tokenizer) for ids in (self.own_greedy, self.served_greedy or []))
            messages.append(
                f"{self.turn.name}: greedy answer differs at token {at:,}: the run has {own}, the server has {served}"
            )
        return messages


@dataclass
class Parity:
    """Comparison of several turns."""

    bound: float
    turns: list[TurnParity] = field(default_factory=list)
    left_out: dict[Column, str] = field(default_factory=dict)
    """Reason why the server does not give a column."""

    def faults(self, tokenizer: PreTrainedTokenizerBase) -> list[str]:
        """Messages about what differs more than rounding explains."""
        return [line for turn in self.turns for line in turn.faults(self.bound, tokenizer)]

    def summary(self) -> dict[str, str]:
        """Figures over all turns, as text by name."""
        count, figures = len(self.turns), {}
        if "prompt" not in self.left_out:
            same = sum(not turn.prompt_place for turn in self.turns)
            figures["prompts with the tokens of training"] = f"{same:,} of {count:,}"
        if "logprobs" not in self.left_out:
            differences = (turn.logprob_differences for turn in self.turns)
            each = np.concatenate([one for one in differences if one is not None])
            figures["difference of a log-probability"] = (
                f"largest {each.max():.2g}, mean {each.mean():.2g} over {each.size:,} tokens (bound {self.bound:g})"
            )
        if "greedy" not in self.left_out:
            equal, tokens = np.sum([turn.greedy_tokens for turn in self.turns], axis=0)
            ties = sum(turn.is_tie for turn in self.turns)
            figures["equal greedy tokens"] = f"{equal / tokens:.1%} of {tokens:,}" + (
                f"; {ties:,} answers part at a near tie" if ties else ""
            )
        return figures


def compare(
    opened: OpenedModel,
    turns: Sequence[AnsweredTurn],
    client: OpenAIClient,
    model: str,
    bound: float | None = None,
    max_new_tokens: int = 64,
) -> Parity:
    """Compare a run's model with a server.

    Args:
        opened: the run's model.
        turns: answers of the run's data.
        client: connection to the server.
        model: name of the model there.
        bound: largest difference of a log-probability; None takes that of the model's dtype or, if it is larger, of
            the type that the server names.
        max_new_tokens: largest number of tokens of a greedy answer.

    Raises:
        RecipeError: the server gives nothing that can be compared, or fails.
    """
    parity = Parity(_bound(opened, client.weight_type(model)) if bound is None else bound)

    def ask(column: Column, name: str, question: Callable[[], T]) -> T | None:
        if column in parity.left_out:
            return None
        try:
            return question()
        except Lacking as error:
            if parity.turns:  # the server gave it for the turns before
                raise RecipeError(f"{name}: {client.url} refuses it: {error}") from error
            parity.left_out[column] = str(error)
            return None

    for turn in turns:
        one, whole = TurnParity(turn), [*turn.prompt, *turn.answer]
        of_the_prompt = partial(client.prompt_ids, model, turn.messages, turn.tools, turn.options)
        one.served_prompt = ask("prompt", turn.name, of_the_prompt)
        start = len(turn.prompt)
        served = ask("logprobs", turn.name, partial(client.logprobs, model, whole, start))
        if served is not None:
            one.logprob_differences = np.abs(np.subtract(_logprobs(opened, whole)[start - 1 :], served))
        limit = min(max_new_tokens, positions(opened) - len(turn.prompt))
        one.own_greedy = [] if "greedy" in parity.left_out else _greedy(opened, turn.prompt, limit)
        one.served_greedy = ask("greedy", turn.name, partial(_served_greedy, opened, one, client, model, limit))
        one.is_tie = one.served_greedy is not None and _is_tie(opened, one, parity.bound)
        parity.turns.append(one)
        if len(parity.left_out) == len(COLUMNS):
            reasons = "; ".join(f"{column}: {reason}" for column, reason in parity.left_out.items())
            raise RecipeError(f"{client.url} gives nothing that can be compared ({reasons})")
    return parity


def _bound(opened: OpenedModel, served_type: str | None) -> float:
    own = BOUNDS.get(opened.base.dtype, BOUNDS[torch.bfloat16])
    if served_type is None:
        return own
    if served_type not in SERVED_BOUNDS:
        raise RecipeError(
            f"the server's weights are {served_type}, whose rounding has no known bound; give --bound, e.g. 1"
        )
    return max(own, SERVED_BOUNDS[served_type])


def _logprobs(opened: OpenedModel, ids: Sequence[int]) -> list[float]:
    return [token.logprob for token in score(opened, ids, 0)]


def _greedy(opened: OpenedModel, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
    config = Decoding(max_new_tokens, temperature=0, repetition_penalty=1.0).generation_config(opened)
    answer: list[int] = []
    stream_tokens(opened, prompt, config, answer.extend)
    return answer


def _served_greedy(opened: OpenedModel, one: TurnParity, client: OpenAIClient, model: str, limit: int) -> list[int]:
    """Tokens of the server's greedy answer; from its text where the server gives no tokens.

    Raises:
        Lacking: the server gives neither, or takes only texts, and the prompt's text has other tokens than training.
    """
    try:
        return client.greedy_ids(model, one.turn.prompt, limit)
    except Lacking as without_tokens:
        text = _text_of(one.turn.prompt, opened.tokenizer)
        try:
            if text is None:
                raise Lacking("the text of the prompt has other tokens than training")
            answer, has_ended = client.greedy_text(model, text, limit)
        except Lacking as without_text:
            raise Lacking(f"{without_tokens}; /v1/completions with a text: {without_text}") from without_text
    own, ends = one.own_greedy, stop_ids(opened.base, opened.tokenizer)
    if opened.tokenizer.decode(own, skip_special_tokens=True) == answer and (own[-1] in ends) == has_ended:
        return own
    ids: list[int] = opened.tokenizer(answer, add_special_tokens=False)["input_ids"]
    return [*ids, *(ends[:1] if has_ended else [])]


def _text_of(prompt: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Text that a server encodes to the tokens of a prompt; None if there is none."""
    starts = list(tokenizer("")["input_ids"])  # a BOS token, where the tokenizer adds one
    text = str(tokenizer.decode(prompt[len(starts) :] if list(prompt[: len(starts)]) == starts else prompt))
    return text if tokenizer(text)["input_ids"] == list(prompt) else None


def _is_tie(opened: OpenedModel, one: TurnParity, bound: float) -> bool:
    at, served = one.greedy_place - 1, one.served_greedy or []
    if not 0 <= at < min(len(one.own_greedy), len(served)):
        return False
    before = [*one.turn.prompt, *one.own_greedy[:at]]
    own, other = (_logprobs(opened, [*before, ids[at]])[-1] for ids in (one.own_greedy, served))
    return own - other <= 2 * bound  # both may have moved
