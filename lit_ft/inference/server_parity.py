"""Comparison of a run with the server that serves it: prompt tokens, log-probabilities and greedy answers.

The tokens are those that training sees, from the code that renders and encodes training rows. The log-probabilities
and greedy answers are those of the run's own model, for the same tokens; so a template that differs is one finding, not
three.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice, zip_longest
from typing import Literal, TypeVar

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from transformers import PreTrainedTokenizerBase

from lit_ft.data.text.formats import Chat, JsonObject
from lit_ft.data.text.rendering import chat_samples, supervised_turns, with_tools
from lit_ft.data.text_data import TextDataModule
from lit_ft.data.tokens.tokenization import Tokenization, check_encodable
from lit_ft.errors import BadRow, RecipeError
from lit_ft.export.model_card import Recipe
from lit_ft.inference.continuous_batching import score
from lit_ft.inference.openai.client import Lacking, OpenAIClient
from lit_ft.inference.opening import OpenedModel
from lit_ft.inference.text_stream import Decoding, NewTokens, positions, stream_tokens
from lit_ft.packed_batch import IGNORE_INDEX
from lit_ft.recipe.parser import RecipeParser

T = TypeVar("T")
Column = Literal["prompt", "logprobs", "greedy"]
COLUMNS: tuple[Column, ...] = ("prompt", "logprobs", "greedy")
BOUNDS = {torch.float32: 0.001, torch.float16: 0.05, torch.bfloat16: 0.5}
"""Largest difference of a token's log-probability that rounding explains, by the dtype of the run's model.

Kernels and batches that differ move a logit by a few units in its last place; a bfloat16 has 8 bits, and logits reach
tens."""
_SHOWN = 6
"""Tokens that are shown where two sides differ."""


@dataclass(frozen=True)
class AnsweredTurn:
    """An answer of the data, with the tokens that training has before it and for it."""

    name: str
    """Location of the row, and number of the turn."""
    messages: Sequence[Mapping[str, object]]
    """Turns before the answer."""
    tools: list[JsonObject] | None
    prompt: list[int]
    answer: list[int]


@dataclass
class TurnParity:
    """What the server makes of one turn, against the run; None where the server does not give it."""

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
        return 0 if self.served_prompt is None else _first_difference(self.turn.prompt, self.served_prompt)

    @property
    def greedy_place(self) -> int:
        """Number of the first token of the greedy answer that differs, from 1; 0 if there is none."""
        return 0 if self.served_greedy is None else _first_difference(self.own_greedy, self.served_greedy)

    @property
    def greedy_tokens(self) -> tuple[int, int]:
        """Equal tokens before the greedy answers part, and tokens of the longer one."""
        longest = max(len(self.own_greedy), len(self.served_greedy or []))
        return (self.greedy_place - 1 if self.greedy_place else longest), longest

    def faults(self, bound: float, tokenizer: PreTrainedTokenizerBase) -> list[str]:
        """Messages about what differs more than rounding explains."""
        found = []
        if at := self.prompt_place:
            sides = _sides(at, self.turn.prompt, self.served_prompt or [], tokenizer)
            found.append(f"{self.turn.name}: prompt differs at token {at:,}: trained are {sides}")
        differences = self.logprob_differences
        if differences is not None and not differences.max() <= bound:  # NaN is a fault too
            at = int(np.argmax(differences))  # NaN counts as the largest
            text = tokenizer.decode([self.turn.answer[at]])
            found.append(
                f"{self.turn.name}: log-probability of answer token {at + 1:,} ({text!r}) differs by "
                f"{differences[at]:.2g}, more than {bound:g}"
            )
        if (at := self.greedy_place) and not self.is_tie:
            sides = _sides(at, self.own_greedy, self.served_greedy or [], tokenizer)
            found.append(f"{self.turn.name}: greedy answer differs at token {at:,}: the run has {sides}")
        return found


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
        count, found = len(self.turns), {}
        if "prompt" not in self.left_out:
            same = sum(not turn.prompt_place for turn in self.turns)
            found["prompts with the tokens of training"] = f"{same:,} of {count:,}"
        if "logprobs" not in self.left_out:
            differences = (turn.logprob_differences for turn in self.turns)
            each = np.concatenate([one for one in differences if one is not None])
            found["difference of a log-probability"] = (
                f"largest {each.max():.2g}, mean {each.mean():.2g} over {each.size:,} tokens (bound {self.bound:g})"
            )
        if "greedy" not in self.left_out:
            equal, tokens = np.sum([turn.greedy_tokens for turn in self.turns], axis=0)
            ties = sum(turn.is_tie for turn in self.turns)
            found["equal greedy tokens"] = f"{equal / tokens:.1%} of {tokens:,}" + (
                f"; {ties:,} answers part at a near tie" if ties else ""
            )
        return found


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
        bound: largest difference of a log-probability; None takes that of the model's dtype.
        max_new_tokens: largest number of tokens of a greedy answer.

    Raises:
        RecipeError: the server gives nothing that can be compared, or fails.
    """
    found = Parity(BOUNDS.get(opened.base.dtype, BOUNDS[torch.bfloat16]) if bound is None else bound)

    def ask(column: Column, name: str, question: Callable[[], T]) -> T | None:
        if column in found.left_out:
            return None
        try:
            return question()
        except Lacking as error:
            if found.turns:  # the server gave it for the turns before
                raise RecipeError(f"{name}: {client.url} refuses it: {error}") from error
            found.left_out[column] = str(error)
            return None

    for turn in turns:
        one, whole = TurnParity(turn), [*turn.prompt, *turn.answer]
        one.served_prompt = ask("prompt", turn.name, partial(client.prompt_ids, model, turn.messages, turn.tools))
        served = ask("logprobs", turn.name, partial(client.logprobs, model, whole))
        if served is not None:
            own = _logprobs(opened, whole)
            start = len(turn.prompt) - 1
            one.logprob_differences = np.abs(np.subtract(own[start:], served[start:]))
        limit = min(max_new_tokens, positions(opened) - len(turn.prompt))
        one.served_greedy = ask("greedy", turn.name, partial(client.greedy_ids, model, turn.prompt, limit))
        if one.served_greedy is not None:
            one.own_greedy = _greedy(opened, turn.prompt, limit)
            one.is_tie = _is_tie(opened, one, found.bound)
        found.turns.append(one)
        if len(found.left_out) == len(COLUMNS):
            reasons = "; ".join(f"{column}: {reason}" for column, reason in found.left_out.items())
            raise RecipeError(f"{client.url} gives nothing that can be compared ({reasons})")
    return found


def answered_turns(recipe: Recipe, opened: OpenedModel, split: str, rows: int) -> list[AnsweredTurn]:
    """Answers of the first conversations of a run's data, each with the tokens of training.

    Args:
        recipe: the run's recipe.
        opened: the run's model.
        split: train or val.
        rows: number of conversations.

    Raises:
        RecipeError: the data cannot be read, or has no conversation that fits the model.
    """
    data = _data_of(recipe)
    if not data.sources[split]:
        raise RecipeError(f"the run has no data.{split}_path; choose the other --split")
    data.preparation = replace(data.preparation, tokenizer=opened.tokenizer)
    found: list[AnsweredTurn] = []
    for turns in islice(_conversations(data, split), rows):
        found += [turn for turn in turns if len(turn.prompt) + len(turn.answer) <= positions(opened)]
    if not found:
        raise RecipeError(f"the {split} data of the run has no answered conversation, and parity compares these")
    return found


def _data_of(recipe: Recipe) -> TextDataModule:
    parser = RecipeParser()
    parser.add_subclass_arguments(LightningDataModule, "data", required=True)
    data = parser.instantiate_classes(parser.parse_object({"data": recipe["data"]})).data
    if not isinstance(data, TextDataModule):
        raise RecipeError(f"the run's data is a {type(data).__name__}; parity compares lit_ft.TextDataModule's")
    return data


def _conversations(data: TextDataModule, split: str) -> Iterator[list[AnsweredTurn]]:
    """Answered turns of each conversation that can be trained on."""
    for source in data.sources[split]:
        if source.index_prefix is not None:
            continue
        tokenization = data.preparation.tokenization(source)
        for location, row in source.rows(streaming=True):
            try:
                example = tokenization.example(row)
                turns = _turns(example, location, tokenization) if isinstance(example, Chat) else []
            except BadRow:
                continue  # training skips it too, or has refused it
            if turns:
                yield turns


def _turns(chat: Chat, location: str, tokenization: Tokenization) -> list[AnsweredTurn]:
    template, closing = tokenization.template, tokenization.tokenizer.eos_token or ""
    chat = with_tools(chat, template, [])
    samples = chat_samples(chat, template, tokenization.supervise, closing, [])
    check_encodable(samples)
    numbers = iter(supervised_turns(chat, tokenization.supervise))
    found = []
    for sample in samples:
        # A sample is, turn by turn, the text before it and its own.
        for end, number in zip(range(2, len(sample) + 1, 2), numbers, strict=False):
            if number == 0 or chat.messages[number]["role"] != "assistant":
                continue
            pieces = [(text, place == end - 1) for place, (text, _) in enumerate(sample[:end])]
            ids, labels, _ = tokenization.encoder.encode([pieces])
            border = int(np.flatnonzero(labels != IGNORE_INDEX)[0])
            messages = [_as_openai(message) for message in chat.messages[:number]]
            name = f"{location}, turn {number + 1}"
            found.append(AnsweredTurn(name, messages, chat.tools, ids[:border].tolist(), ids[border:].tolist()))
    return found


def _as_openai(message: Mapping[str, object]) -> Mapping[str, object]:
    """Message whose tool calls have their arguments as text, as OpenAI's interface wants them."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {
        **message,
        "tool_calls": [
            {**one, "function": {**one["function"], "arguments": json.dumps(one["function"]["arguments"])}}
            for one in calls
        ],
    }


def _logprobs(opened: OpenedModel, ids: Sequence[int]) -> list[float]:
    return [token.logprob for token in score(opened, ids, 0)]


def _greedy(opened: OpenedModel, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
    config = Decoding(max_new_tokens, temperature=0, repetition_penalty=1.0).generation_config(opened)
    answer: list[int] = []
    stream_tokens(opened, prompt, config, NewTokens(answer.extend))
    return answer


def _is_tie(opened: OpenedModel, one: TurnParity, bound: float) -> bool:
    at, served = one.greedy_place - 1, one.served_greedy or []
    if not 0 <= at < min(len(one.own_greedy), len(served)):
        return False
    before = [*one.turn.prompt, *one.own_greedy[:at]]
    own, other = (_logprobs(opened, [*before, ids[at]])[-1] for ids in (one.own_greedy, served))
    return own - other <= 2 * bound  # both may have moved


def _first_difference(ids: Sequence[int], others: Sequence[int]) -> int:
    """Number of the first token that differs, from 1; 0 if there is none."""
    pairs = enumerate(zip_longest(ids, others), 1)
    return next((number for number, (one, other) in pairs if one != other), 0)


def _sides(at: int, own: Sequence[int], served: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    shown = [list(ids[at - 1 : at - 1 + _SHOWN]) for ids in (own, served)]
    one, other = (f"{tokenizer.decode(ids)!r} {ids}" if ids else "nothing more" for ids in shown)
    return f"{one}, the server has {other}"
