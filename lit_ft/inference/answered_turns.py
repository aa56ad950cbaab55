"""Answers of a run's data, each with the tokens of its prompt and its own, as in training."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Literal

import numpy as np

from lit_ft.data.text.formats import Chat, JsonObject, answers_of
from lit_ft.data.text.rendering import chat_samples, supervised_turns, with_tools
from lit_ft.data.text.sources import Source
from lit_ft.data.text_data import TextDataModule
from lit_ft.data.tokens.tokenization import Tokenization, check_encodable
from lit_ft.errors import BadRow, RecipeError
from lit_ft.export import restore_run
from lit_ft.export.model_card import Recipe
from lit_ft.inference.opening import OpenedModel
from lit_ft.inference.text_stream import positions
from lit_ft.packed_batch import IGNORE_INDEX


@dataclass(frozen=True)
class AnsweredTurn:
    """An answer of the data, with the tokens of its prompt and its own, as in training."""

    name: str
    """Location of the row, and number of the turn."""
    messages: Sequence[Mapping[str, object]]
    """Turns before the answer."""
    tools: list[JsonObject] | None
    options: JsonObject
    """Variables of the chat template that the row sets."""
    prompt: list[int]
    answer: list[int]


@dataclass
class AnsweredTurns:
    """Answers of the first conversations of a run's data, and how many were passed over."""

    turns: list[AnsweredTurn] = field(default_factory=list)
    too_long: int = 0
    """Answers that end behind the model's last position."""
    bad_rows: int = 0
    """Rows that cannot be read; training skips them too, or has refused them."""
    other_rows: int = 0
    """Rows without a conversation that is answered: raw text, tokens."""

    def passed_over(self) -> list[str]:
        """Sentences on what was passed over."""
        counts = (
            (self.too_long, "answers end behind the model's last position"),
            (self.bad_rows, "rows cannot be read (data.on_bad_row)"),
            (self.other_rows, "rows have no answered conversation"),
        )
        return [f"passed over: {count:,} {what}" for count, what in counts if count]


def answered_turns(recipe: Recipe, opened: OpenedModel, split: Literal["train", "val"], rows: int) -> AnsweredTurns:
    """Answers of the first conversations of a run's data, each with the tokens of training.

    Args:
        recipe: the run's recipe.
        opened: the run's model.
        split: train or val; with ``data.val_fraction``, val are the rows that were held out.
        rows: number of conversations.

    Raises:
        RecipeError: the data cannot be read, or has no conversation that fits the model.
    """
    data = restore_run.data_of(recipe["data"], "parity")
    data.splits.preparation = replace(data.splits.preparation, tokenizer=opened.tokenizer)
    sources = _sources(data, split, opened)
    answered, most = AnsweredTurns(), positions(opened)
    for turns in islice(_conversations(data, sources, answered), rows):
        fitting = [turn for turn in turns if len(turn.prompt) + len(turn.answer) <= most]
        answered.turns += fitting
        answered.too_long += len(turns) - len(fitting)
    if not answered.turns:
        reasons = "; ".join(answered.passed_over())
        raise RecipeError(
            f"the {split} data of the run has no answered conversation, and parity compares these"
            + (f" ({reasons})" if reasons else "")
        )
    return answered


def _sources(
    data: TextDataModule, split: Literal["train", "val"], opened: OpenedModel
) -> list[tuple[Source, frozenset[int] | None]]:
    if split == "train":
        return [(source, None) for source in data.splits.sources["train"]]
    if not (sources := data.validation_rows(opened.tokenizer)):
        raise RecipeError("the run has neither data.val_path nor data.val_fraction; choose --split train")
    return sources


def _conversations(
    data: TextDataModule, sources: Sequence[tuple[Source, frozenset[int] | None]], answered: AnsweredTurns
) -> Iterator[list[AnsweredTurn]]:
    """Answered turns of each conversation that can be trained on; other rows are counted."""
    for source, numbers in sources:
        if source.index_prefix is not None:
            answered.other_rows += 1
            continue
        tokenization = data.splits.preparation.tokenization(source)
        for number, (location, row) in enumerate(source.rows(streaming=True)):
            if numbers is not None and number not in numbers:
                continue
            try:
                example = answers_of(tokenization.example(row))[0]
                turns = _turns(example, location, tokenization) if isinstance(example, Chat) else []
            except BadRow:
                answered.bad_rows += 1
                continue
            if turns:
                yield turns
            else:
                answered.other_rows += 1


def _turns(chat: Chat, location: str, tokenization: Tokenization) -> list[AnsweredTurn]:
    template, closing = tokenization.template_of(chat), tokenization.tokenizer.eos_token or ""
    tokenization.drop_unused_keys(chat)  # which a server would refuse
    chat = with_tools(chat, template, [])
    samples = chat_samples(chat, template, tokenization.supervise, closing, [])
    check_encodable(samples)
    options = {name: value for name, value in chat.options.items() if template.uses(name)}
    numbers = iter(supervised_turns(chat, tokenization.supervise))
    turns = []
    for sample in samples:
        # A sample is, turn by turn, the text before it and its own.
        for end, number in zip(range(2, len(sample) + 1, 2), numbers, strict=False):
            if number == 0 or chat.messages[number]["role"] != "assistant":
                continue
            pieces = [(text, index == end - 1) for index, (text, _) in enumerate(sample[:end])]
            ids, labels, _ = tokenization.encoder.encode([pieces])
            border = int(np.flatnonzero(labels != IGNORE_INDEX)[0])
            messages = [_as_openai(message) for message in chat.messages[:number]]
            prompt, answer = ids[:border].tolist(), ids[border:].tolist()
            name = f"{location}, turn {number + 1}"
            turns.append(AnsweredTurn(name, messages, chat.tools, options, prompt, answer))
    return turns


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
