"""Columns that no format knows: the mapping that the error suggests is one that works."""

import json
import re
from typing import Any

import pytest
import yaml

from lit_ft.data.text.columns import as_option, suggested_columns
from lit_ft.data.text.formats import FORMATS, find_format, renamed
from lit_ft.errors import BadRow

TURNS = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
SHARES = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"question": "q", "answer": "a"}, {"instruction": "question", "output": "answer"}),
        ({"Question": "q", "Answer": "a", "id": "3"}, {"instruction": "Question", "output": "Answer"}),
        ({"input": "q", "output": "a"}, {"instruction": "input", "output": "output"}),
        ({"instruction": "q", "response": "a"}, {"instruction": "instruction", "output": "response"}),
        ({"prompt": "q", "response": "a"}, {"instruction": "prompt", "output": "response"}),
        (
            {"instruction": "q", "context": "c", "response": "a"},
            {"instruction": "instruction", "output": "response", "input": "context"},
        ),
        ({"问题": "q", "回答": "a"}, {"instruction": "问题", "output": "回答"}),
        ({"content": "c", "url": "u"}, {"text": "content"}),
        ({"dialog": TURNS}, {"messages": "dialog"}),
        ({"chat": SHARES}, {"conversations": "chat"}),
        ({"id": 3, "score": 0.5}, {}),
        ({"instruction": "q"}, {}),
    ],
)
def test_suggestions(row: Any, columns: dict[str, str]) -> None:
    assert suggested_columns(row) == columns
    if not columns:
        return
    with pytest.raises(BadRow, match=re.escape(f"say which is which, e.g. {as_option(columns)}")):
        find_format(row)
    mapped = renamed(row, columns)
    FORMATS[find_format(mapped)].read(mapped)


def test_names_that_need_quotes_are_quoted() -> None:
    columns = {"instruction": "the question: 1", "output": "回答"}
    value = as_option(columns).removeprefix("--data.columns '").removesuffix("'")
    assert yaml.safe_load(value) == columns


PREFERENCES: dict[str, tuple[Any, list[dict[str, str]]]] = {
    "texts": (
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        [{"prompt": "prompt", "completion": "chosen"}, {"instruction": "prompt", "output": "chosen"}],
    ),
    "texts, another column": (
        {"question": "q", "chosen": "a", "rejected": "b"},
        [{"prompt": "question", "completion": "chosen"}, {"instruction": "question", "output": "chosen"}],
    ),
    "messages": (
        {"prompt": TURNS[:1], "chosen": TURNS[1:], "rejected": TURNS[1:]},
        [{"prompt": "prompt", "completion": "chosen"}],
    ),
    "conversations with the prompt": ({"chosen": TURNS, "rejected": TURNS}, [{"messages": "chosen"}]),
    "ShareGPT": ({"chosen": SHARES, "rejected": SHARES}, [{"conversations": "chosen"}]),
}


@pytest.mark.parametrize("name", PREFERENCES)
def test_preference_data_says_how_to_train_on_the_chosen_answers(name: str) -> None:
    row, mappings = PREFERENCES[name]
    with pytest.raises(BadRow) as refused:
        find_format(row)
    message = str(refused.value)
    assert message.startswith("is preference data (columns 'chosen' and 'rejected'); to train on both answers, set ")
    assert "data.format=preference and model.class_path=lit_ft.PreferenceLM; to train on the chosen" in message
    for columns in mappings:
        assert as_option(columns) in message
        mapped = renamed(row, columns)
        FORMATS[find_format(mapped)].read(mapped)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "q", "completion": "a", "label": False},
        {"messages": TURNS, "label": True},
        {"instruction": "q", "output": "a", "kto_tag": False},
    ],
)
def test_answers_that_are_marked_as_good_or_bad(row: dict[str, object]) -> None:
    mark = next(name for name in ("label", "kto_tag") if name in row)
    with pytest.raises(BadRow, match=rf"is preference data \('{mark}' says .* keep the rows whose {mark} is true"):
        find_format(row)
    assert find_format({**row, mark: "a"}) == find_format({name: row[name] for name in row if name != mark})


def test_shares_in_the_column_of_messages() -> None:
    with pytest.raises(BadRow, match=re.escape("give --data.columns '{conversations: messages}'")):
        find_format({"messages": SHARES})


def test_preferences_beside_a_conversation() -> None:
    row = {"conversations": SHARES[:1], "chosen": SHARES[1], "rejected": SHARES[1]}
    with pytest.raises(BadRow, match=r"write rows of 'prompt' and 'completion'.*data\.format=sharegpt to train on its"):
        find_format(row)


def test_a_row_of_half_a_format_is_read_as_that_format() -> None:
    assert find_format(json.loads('{"instruction": "a", "input": "b"}')) == "alpaca"
    assert find_format({"output": "a", "score": 1}) == "alpaca"
