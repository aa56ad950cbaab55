import json
import re
from typing import Any

import pytest
from shared_fixtures import make_tokenizer

from lit_ft.data.text.formats import FORMATS, Chat, Example, Text, Tokens, find_format
from lit_ft.data.tokens.tokenization import Tokenization
from lit_ft.errors import BadRow
from lit_ft.packed_batch import IGNORE_INDEX

N = IGNORE_INDEX


def turn(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


ASK, SAY = turn("user", "q"), turn("assistant", "a")
TOOL = {"name": "add", "parameters": {"type": "object"}}
TOOLS = [{"type": "function", "function": TOOL}]
ONE, TWO = {"name": "add", "arguments": {"x": 1}}, {"name": "add", "arguments": {"x": 2}}
CALLED = turn("assistant", "", tool_calls=[call("add", x=1), call("add", x=2)])


def share(*turns: tuple[str, str], **more: Any) -> dict[str, Any]:
    return {"conversations": [{"from": role, "value": value} for role, value in turns], **more}


def chat(*turns: Any, **more: Any) -> dict[str, Any]:
    return {"messages": list(turns), **more}


READ: dict[str, tuple[str, dict[str, Any], Example]] = {
    "alpaca": ("alpaca", {"instruction": "q", "output": "a"}, Chat([ASK, SAY])),
    "alpaca, empty options": (
        "alpaca",
        {"instruction": "q", "input": "", "output": "a", "system": None, "history": None, "id": 3},
        Chat([ASK, SAY]),
    ),
    "alpaca, empty cells": (
        "alpaca",
        {"instruction": "q", "input": "", "output": "a", "system": "", "history": "", "tools": ""},
        Chat([ASK, SAY]),
    ),
    "alpaca, all options": (
        "alpaca",
        {"instruction": "q", "input": "i", "output": "a", "system": "s", "history": [["q1", "a1"], ("q2", "a2")]},
        Chat(
            [
                turn("system", "s"),
                turn("user", "q1"),
                turn("assistant", "a1"),
                turn("user", "q2"),
                turn("assistant", "a2"),
                turn("user", "q\ni"),
                SAY,
            ]
        ),
    ),
    "alpaca, tools": (
        "alpaca",
        {"instruction": "q", "output": "a", "tools": json.dumps([TOOL]), "images": []},
        Chat([ASK, SAY], TOOLS),
    ),
    "alpaca, input alone": ("alpaca", {"instruction": "", "input": "i", "output": "a"}, Chat([turn("user", "i"), SAY])),
    "sharegpt": ("sharegpt", share(("human", "q"), ("gpt", "a")), Chat([ASK, SAY])),
    "sharegpt, other names": ("sharegpt", share(("user", "q"), ("assistant", "a")), Chat([ASK, SAY])),
    "sharegpt, system": (
        "sharegpt",
        share(("human", "q"), ("gpt", "a"), system="s"),
        Chat([turn("system", "s"), ASK, SAY]),
    ),
    "sharegpt, system turn first": (
        "sharegpt",
        share(("system", "mine"), ("human", "q"), ("gpt", "a")),
        Chat([turn("system", "mine"), ASK, SAY]),
    ),
    "messages, a call without arguments": (
        "messages",
        {
            "messages": [ASK, turn("assistant", "a", tool_calls=[{"name": "f", "arguments": ""}])],
            "tools": [{"type": "function", "name": "f"}],
        },
        Chat(
            [
                ASK,
                turn("assistant", "a", tool_calls=[{"type": "function", "function": {"name": "f", "arguments": {}}}]),
            ],
            [{"type": "function", "function": {"name": "f"}}],
        ),
    ),
    "sharegpt, parallel calls": (
        "sharegpt",
        share(
            ("human", "q"),
            ("function_call", json.dumps([ONE, TWO])),
            ("observation", "3"),
            ("tool", "4"),
            ("gpt", "a"),
            tools=json.dumps([TOOL]),
        ),
        Chat([ASK, CALLED, turn("tool", "3"), turn("tool", "4"), SAY], TOOLS),
    ),
    "sharegpt, one call": (
        "sharegpt",
        share(("human", "q"), ("function_call", json.dumps(ONE)), tools=""),
        Chat([ASK, turn("assistant", "", tool_calls=[call("add", x=1)])]),
    ),
    "sharegpt, marks": (
        "sharegpt",
        {
            "conversations": [
                {"from": "human", "value": "q", "train": True},
                {"from": "gpt", "value": "a", "weight": 0},
                {"from": "human", "value": "q", "train": None},
                {"from": "gpt", "value": "a"},
            ],
            "system": "s",
        },
        Chat([turn("system", "s"), ASK, SAY, ASK, SAY], None, {1: True, 2: False}),
    ),
    "messages": ("messages", chat(turn("system", "s"), ASK, SAY), Chat([turn("system", "s"), ASK, SAY])),
    "messages, developer": (
        "messages",
        chat(turn("developer", "s"), ASK, SAY),
        Chat([turn("developer", "s"), ASK, SAY]),
    ),
    "messages, tools": (
        "messages",
        chat(
            ASK,
            turn(
                "assistant",
                None,
                tool_calls=[
                    {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}},
                    {"function": {"name": "add", "arguments": {"x": 2}}},
                ],
            ),
            turn("tool", "3", tool_call_id="c1"),
            turn("function", "", name="add"),
            SAY,
            tools=[TOOL, *TOOLS],
        ),
        Chat(
            [
                ASK,
                turn("assistant", "", tool_calls=[{**call("add", x=1), "id": "c1"}, call("add", x=2)]),
                turn("tool", "3", tool_call_id="c1"),
                turn("tool", "", name="add"),
                SAY,
            ],
            [*TOOLS, *TOOLS],
        ),
    ),
    "messages, results that are no text": (
        "messages",
        chat(
            ASK,
            turn("assistant", None, tool_calls={"name": "now"}),
            turn("tool", {"at": "sky", "color": "gr\u00fcn", "by": None}),
            turn("tool", [1, {"x": 2}]),
            turn("tool", {}),
            turn("tool", [{"type": "text", "text": "3"}]),
            turn("tool", []),
            SAY,
        ),
        Chat(
            [
                ASK,
                turn("assistant", "", tool_calls=[call("now")]),
                turn("tool", '{"at": "sky", "color": "gr\u00fcn", "by": null}'),
                turn("tool", '[1, {"x": 2}]'),
                turn("tool", "{}"),
                turn("tool", "3"),
                turn("tool", ""),
                SAY,
            ]
        ),
    ),
    "messages, text and one call": (
        "messages",
        chat(ASK, turn("assistant", "t", tool_calls={"name": "now"}), tools={}),
        Chat([ASK, turn("assistant", "t", tool_calls=[call("now")])]),
    ),
    "messages, parts": (
        "messages",
        chat(turn("user", [{"type": "text", "text": "q"}, {"type": "text", "text": "!"}]), SAY),
        Chat([turn("user", "q!"), SAY]),
    ),
    "messages, marks": (
        "messages",
        chat(
            turn("user", "q", weight=1),
            turn("assistant", "a", weight=1.0),
            turn("user", "q", train=1),
            turn("assistant", "a", train=False),
            turn("user", "q", weight=0),
            turn("assistant", "a", train=True, weight=0),
        ),
        Chat([ASK, SAY, ASK, SAY, ASK, SAY], None, {2: True, 3: False, 4: False, 5: True}),
    ),
    "messages, marks of ms-swift and Axolotl": (
        "messages",
        chat(
            turn("user", "q", loss=True),
            turn("assistant", "a", loss=False, train_detail=[]),
            turn("user", "q", training=True),
            turn("assistant", "a", training=False),
            turn("user", "q", loss_scale=1.0),
            turn("assistant", "a", loss_scale=0.0),
        ),
        Chat([ASK, SAY, ASK, SAY, ASK, SAY], None, {1: False, 2: True, 3: False, 5: False}),
    ),
    "messages, system in a column": (
        "messages",
        chat(ASK, turn("assistant", "a", train=False), ASK, SAY, system="s"),
        Chat([turn("system", "s"), ASK, SAY, ASK, SAY], None, {2: False}),
    ),
    "messages, OpenAI's older calls": (
        "messages",
        chat(
            ASK,
            turn("assistant", None, function_call={"name": "add", "arguments": '{"x": 1}'}),
            turn("function", "1", name="add"),
            SAY,
            functions=[TOOL],
        ),
        Chat([ASK, turn("assistant", "", tool_calls=[call("add", x=1)]), turn("tool", "1", name="add"), SAY], TOOLS),
    ),
    "messages, roles of ms-swift": (
        "messages",
        chat(
            ASK,
            turn("assistant", "t", loss=False),
            turn("tool_call", '{"name": "add", "arguments": {"x": 1}}'),
            turn("tool_call", '{"name": "add", "arguments": "{\\"x\\": 2}"}', loss=False),
            turn("tool_response", "3"),
            turn("tool_response", "4"),
            SAY,
            tools=json.dumps(TOOLS),
        ),
        Chat(
            [
                ASK,
                turn("assistant", "t", tool_calls=[call("add", x=1), call("add", x=2)]),
                turn("tool", "3"),
                turn("tool", "4"),
                SAY,
            ],
            TOOLS,
            {1: False},
        ),
    ),
    "messages, empty calls, as servers and Arrow write them": (
        "messages",
        chat(turn("user", "q", tool_calls=[]), turn("assistant", "a", tool_calls=[], function_call={})),
        Chat([ASK, SAY]),
    ),
    "messages, roles of ShareGPT": (
        "messages",
        chat(
            turn("human", "q"),
            turn("function_call", '[{"name": "now"}, {"name": "add", "arguments": {"x": 1}}]'),
            turn("observation", "3"),
            turn("gpt", "a"),
        ),
        Chat([ASK, turn("assistant", "", tool_calls=[call("now"), call("add", x=1)]), turn("tool", "3"), SAY]),
    ),
    "messages, calls that are not JSON in a text": (
        "messages",
        chat(
            ASK,
            turn("tool_call", {"name": "now"}),
            turn("tool_call", [{"name": "add", "arguments": {"x": 1}}]),
            turn("tool_response", "3"),
            SAY,
        ),
        Chat([ASK, turn("assistant", "", tool_calls=[call("now"), call("add", x=1)]), turn("tool", "3"), SAY]),
    ),
    "sharegpt, thinking before a call": (
        "sharegpt",
        {
            "conversations": [
                {"from": "human", "value": "q"},
                {"from": "function_call", "value": '<think>\nr\n</think>\n\n{"name": "now"}'},
                {"from": "observation", "value": "3"},
                {"from": "gpt", "value": "a"},
            ]
        },
        Chat([ASK, turn("assistant", "<think>\nr\n</think>\n", tool_calls=[call("now")]), turn("tool", "3"), SAY]),
    ),
    "prompt_completion, a call in each": (
        "prompt_completion",
        {
            "prompt": [ASK, SAY, ASK, turn("tool_call", '{"name": "now"}'), turn("tool", "3")],
            "completion": [turn("assistant", "t"), turn("tool_call", '{"name": "now"}'), turn("tool", "4"), SAY],
        },
        Chat(
            [
                ASK,
                SAY,
                ASK,
                turn("assistant", "", tool_calls=[call("now")]),
                turn("tool", "3"),
                turn("assistant", "t", tool_calls=[call("now")]),
                turn("tool", "4"),
                SAY,
            ],
            None,
            {1: False, 3: False},
        ),
    ),
    "messages, other keys": (
        "messages",
        chat(turn("user", "q", name="Ann"), turn("assistant", "a", name=None, reasoning_content="r", refusal="")),
        Chat(
            [turn("user", "q", name="Ann"), turn("assistant", "a", reasoning_content="r", refusal="")],
            None,
            {},
            {},
            {"name"},
        ),
    ),
    "messages, answer first": ("messages", chat(SAY), Chat([SAY])),
    "completion": ("completion", {"text": " t\n"}, Text(" t\n")),
    "prompt_completion": ("prompt_completion", {"prompt": "q ", "completion": "a"}, Text("a", "q ")),
    "prompt_completion, messages": (
        "prompt_completion",
        {"prompt": [ASK, SAY, ASK], "completion": [SAY, ASK, SAY], "tools": TOOLS},
        Chat([ASK, SAY, ASK, SAY, ASK, SAY], TOOLS, {1: False}),
    ),
    "prompt_completion, messages and a system prompt": (
        "prompt_completion",
        {"prompt": [ASK, SAY, ASK], "completion": [SAY], "system": "s"},
        Chat([turn("system", "s"), ASK, SAY, ASK, SAY], None, {2: False}),
    ),
    "tokenized": ("tokenized", {"input_ids": [5, 6]}, Tokens([5, 6], [5, 6])),
    "tokenized, labels": (
        "tokenized",
        {"input_ids": [5, 6, 7], "labels": [N, 6, 9], "loss_mask": [1, 1, 1], "attention_mask": None},
        Tokens([5, 6, 7], [N, 6, 9]),
    ),
    "tokenized, loss_mask": (
        "tokenized",
        {"input_ids": [5, 6, 7], "labels": None, "loss_mask": [0, 0, 1]},
        Tokens([5, 6, 7], [N, N, 7]),
    ),
    "tokenized, completion_mask": (
        "tokenized",
        {"input_ids": [5, 6], "completion_mask": [False, True]},
        Tokens([5, 6], [N, 6]),
    ),
    "tokenized, assistant_masks": (
        "tokenized",
        {"input_ids": [5, 6], "assistant_masks": [0, 1]},
        Tokens([5, 6], [N, 6]),
    ),
    "tokenized, padding": (
        "tokenized",
        {"input_ids": [0, 5, 6, 0], "labels": [N, N, 6, 0], "attention_mask": [0, 1, 1, 0]},
        Tokens([5, 6], [N, 6]),
    ),
}


@pytest.mark.parametrize("name", READ)
def test_what_a_row_says(name: str) -> None:
    form, row, example = READ[name]
    before = json.dumps(row)
    assert FORMATS[form].read(row) == example
    assert find_format(row) == form
    assert json.dumps(row) == before  # the row is left as it was


CALL_OF = {"name": "f", "arguments": {}}
BAD: dict[str, list[tuple[Any, str]]] = {
    "alpaca": [
        ({"output": "a"}, "has no 'instruction'; each row needs it (columns here: 'output')"),
        (
            {"instruction": "q", "\ud800": 1},
            "has no 'output'; each row needs it (columns here: 'instruction', '\\ud800')",
        ),
        ({}, "has no 'instruction'; each row needs it (columns here: none)"),
        ({"instruction": 3, "output": "a"}, "'instruction' is an int; text is needed"),
        ({"instruction": "q", "output": None}, "'output' is null; each row needs it"),
        ({"instruction": "q", "output": ["a"]}, "'output' is a list of str; text is needed"),
        ({"instruction": "q", "input": {}, "output": "a"}, "'input' is a dict; text is needed"),
        ({"instruction": "q", "output": "a", "system": True}, "'system' is a bool; text is needed"),
        ({"instruction": "", "output": "a"}, "'instruction' is empty; the user turn needs text"),
        ({"instruction": "q", "output": ""}, "'output' is empty; there is nothing to learn from this row, remove it"),
        ({"instruction": "q", "output": "a", "history": "no"}, "'history' is a str; a list is needed"),
        (
            {"instruction": "q", "output": "a", "history": [["q", "a"], ["q"]]},
            "'history' item 2 is a list of str; a pair [question, answer] is needed",
        ),
        (
            {"instruction": "q", "output": "a", "history": ["qa"]},
            "'history' item 1 is a str; a pair [question, answer] is needed",
        ),
        ({"instruction": "q", "output": "a", "history": [["q", 1]]}, "'history' item 1 is an int; text is needed"),
        (
            {"instruction": "q", "output": "a", "history": [["q", ""]]},
            "'history' item 1 is empty; remove it, or the row",
        ),
    ],
    "sharegpt": [
        ({}, "has no 'conversations'; each row needs it (columns here: none)"),
        (share(), "'conversations' is empty; a list is needed"),
        ({"conversations": {"from": "human"}}, "'conversations' is a dict; a list is needed"),
        ({"conversations": ["q"]}, "'conversations' item 1 is a str; an object with 'from' and 'value' is needed"),
        ({"conversations": [{"value": "q"}]}, "'conversations' item 1: 'from' is missing; text is needed"),
        ({"conversations": [{"from": "human"}]}, "'conversations' item 1: 'value' is missing; text is needed"),
        (
            share(("bard", "q")),
            "'conversations' item 1: 'from' is 'bard'; known are human, user, gpt, assistant, system",
        ),
        (share(("human", "")), "'conversations' item 1: 'content' is empty; remove it, or the row"),
        (share(("human", "q"), ("gpt", ""), system="s"), "'conversations' item 2: 'content' is empty"),
        (share(("system", "s"), ("human", "q"), system="s"), "has a 'system' and a system turn in 'conversations'"),
        (share(("human", "q")), "'conversations' holds no assistant turn; there is nothing to learn from this row"),
        (share(("human", "q"), ("system", "s")), "item 2: 'role' is 'system' after other turns; it must come first"),
        (share(("function_call", "{")), "'conversations' item 1: the text of a function_call is not JSON ("),
        (share(("function_call", "[" * 100_000)), "the text of a function_call is not JSON (maximum recursion"),
        (share(("function_call", "null")), "the text of a function_call is 'null'; name and arguments are needed"),
        (share(("function_call", "[]")), "the text of a function_call is '[]'; name and arguments are needed"),
        (
            share(("function_call", "[3]")),
            "item 1: a tool call is an int without a name; it needs 'name' and 'arguments'",
        ),
        (share(("gpt", "a"), tools="{"), "'tools' is not JSON ("),
    ],
    "messages": [
        ({"messages": None}, "'messages' is null; each row needs it"),
        ({"messages": "[{'role': 'user'}]"}, "'messages' is not JSON (Expecting property name"),
        ({"messages": "{}"}, "'messages' is a str; a list is needed"),
        (chat(), "'messages' is empty; a list is needed"),
        (chat("q"), "'messages' item 1 is a str; an object with 'role' and 'content' is needed"),
        (chat({"content": "q"}), "'messages' item 1: 'role' is missing; text is needed"),
        (
            chat(turn("bot", "q")),
            "item 1: 'role' is 'bot'; did you mean assistant? known are system, developer, user, ",
        ),
        (chat(turn("Human", "q")), "item 1: 'role' is 'Human'; did you mean user? known are system, developer, user, "),
        (
            chat(turn("narrator", "q")),
            "item 1: 'role' is 'narrator'; known are system, developer, user, assistant, tool",
        ),
        (chat({"role": "user"}), "'messages' item 1: 'content' is missing; text is needed"),
        (chat(ASK, turn("assistant", "")), "'messages' item 2: 'content' is empty; remove it, or the row"),
        (chat(turn("user", [])), "'messages' item 1: 'content' is empty; remove it, or the row"),
        (chat(turn("user", 3)), "'messages' item 1: 'content' is an int; text is needed"),
        (
            chat(turn("user", [{"type": "image_url"}])),
            "item 1: 'content' holds a part of type 'image_url'; only text can be read",
        ),
        (chat(ASK, SAY, images=["a.png"]), "has 'images'; only text can be read; remove the row, or the column"),
        (chat(turn("system", "s"), ASK, SAY, system="t"), "has a 'system' and a system turn in 'messages'; keep one"),
        (chat(ASK, turn("assistant", "a", loss_scale=0.5)), "item 2: 'loss_scale' is 0.5; it must be 1 or true"),
        (
            chat(ASK, turn("assistant", "a", train_detail=[{"begin_offset": 0, "end_offset": 0, "train": False}])),
            "item 2: 'train_detail' marks parts of a turn; a turn is trained on in full, or not at all (train: fals",
        ),
        (chat(turn("user", [{}])), "item 1: 'content' holds a part of type missing; only text can be read"),
        (chat(turn("user", ["q"])), "item 1: 'content' holds a part that is a str; only text can be read"),
        (chat(turn("user", [{"type": "text"}])), "item 1: 'text' of 'content' is missing; text is needed"),
        (chat(ASK), "'messages' holds no assistant turn; there is nothing to learn from this row, remove it"),
        (chat(ASK, SAY, SAY), "item 3: two assistant turns follow each other; join them, or put back what was between"),
        (
            chat(ASK, SAY, turn("tool_call", '{"name": "f"}', loss=False)),
            "item 3: is one answer with the turn before it, which is marked otherwise; mark both alike",
        ),
        (chat(ASK, turn("tool_call", "f(1)")), "item 2: the text of a tool_call is not JSON ("),
        (chat(ASK, turn("tool_call", "<think>r</think>f")), "item 2: the text of a tool_call is not JSON ("),
        (
            chat(ASK, SAY, turn("tool_call", '<think>r</think>{"name": "f"}')),
            "item 3: two assistant turns follow each other; join them",
        ),
        (chat(ASK, turn("developer", "s")), "item 2: 'role' is 'developer' after other turns; it must come first"),
        (
            chat(ASK, turn("tool", "3")),
            "item 2: a tool's result follows no tool call; put back the assistant turn with",
        ),
        (chat(ASK, CALLED, ASK), "item 3: the tool call before it has no result; put back the turn of role 'tool'"),
        (chat(turn("user", "q", tool_calls=[CALL_OF])), "item 1: 'tool_calls' belong to the assistant, not to 'user'"),
        (chat(ASK, turn("assistant", "", tool_calls=[])), "item 2: 'content' is empty; remove it, or the row"),
        (
            chat(turn("assistant", "a", tool_calls=["f"])),
            "item 1: a tool call is a str without a name; it needs 'name'",
        ),
        (chat(turn("assistant", "a", tool_calls="f")), "item 1: 'tool_calls' is not JSON ("),
        (chat(turn("assistant", "a", tool_calls=[{"name": ""}])), "item 1: a tool call is a dict without a name"),
        (
            chat(turn("assistant", "a", tool_calls=[{"name": "f", "arguments": "{x}"}])),
            "item 1: 'arguments' is not JSON (Expecting property name",
        ),
        (
            chat(turn("assistant", "a", tool_calls=[{"name": "f", "arguments": [1]}])),
            "item 1: 'arguments' of 'f' is a list of int; an object is needed",
        ),
        (
            chat(ASK, turn("assistant", "a", train="yes")),
            "item 2: 'train' is 'yes'; it must be 1 or true (train on it), or 0 or false",
        ),
        (chat(ASK, turn("assistant", "a", weight=0.5)), "item 2: 'weight' is 0.5; it must be 1 or true"),
        (chat(ASK, turn("assistant", "a", weight=[[1]])), "item 2: 'weight' is a list of list; it must be 1 or true"),
        (
            chat(ASK, SAY, tools=[3]),
            "'tools' is a list of int; a list of objects is needed, or a string that holds one",
        ),
        *(
            (chat(ASK, SAY, tools=[TOOL, bad]), "'tools' item 2 is no function with a name; it needs 'name'")
            for bad in ({"x": 1}, {"type": "retrieval"}, {"function": "f"}, {"function": {"name": 3}}, {"name": ""})
        ),
        (chat(ASK, SAY, tools=0), "'tools' is an int; a list of objects is needed, or a string that holds one as JSON"),
        (chat(ASK, SAY, tools='{"name": "f"}'), "'tools' is a dict; a list of objects is needed"),
    ],
    "completion": [
        ({}, "has no 'text'; each row needs it (columns here: none)"),
        ({"text": ""}, "'text' is empty; remove it, or the row"),
        ({"text": float("nan")}, "'text' is a float; text is needed"),
    ],
    "prompt_completion": [
        ({"prompt": "q"}, "has no 'completion'; each row needs it (columns here: 'prompt')"),
        ({"completion": "a", "prompt": None}, "'prompt' is null; each row needs it"),
        ({"prompt": "q", "completion": ""}, "'completion' is empty; remove it, or the row"),
        ({"prompt": "", "completion": "a"}, "'prompt' is empty; remove it, or the row"),
        ({"prompt": [ASK], "completion": "a"}, "'prompt' is a list of dict; text is needed"),
        (
            {"prompt": [ASK], "completion": [turn("assistant", "")]},
            "'prompt and completion' item 2: 'content' is empty",
        ),
        (
            {"prompt": [ASK, SAY], "completion": [ASK]},
            "'completion' holds no assistant turn; there is nothing to learn",
        ),
        ({"prompt": [ASK, SAY], "completion": []}, "'completion' holds no assistant turn; there is nothing to learn"),
    ],
    "tokenized": [
        ({}, "'input_ids' is missing; a list of whole numbers is needed"),
        ({"input_ids": []}, "'input_ids' is empty; remove the row"),
        ({"input_ids": "5 6"}, "'input_ids' is a str; a list of whole numbers is needed"),
        ({"input_ids": [5, 6.0]}, "'input_ids' is a list of float, int; a list of whole numbers is needed"),
        ({"input_ids": [True, False]}, "'input_ids' is a list of bool; a list of whole numbers is needed"),
        ({"input_ids": [5, 2**31]}, "'input_ids' holds a number that is no token id; the largest is 2147483648"),
        ({"input_ids": [5, 10**4000]}, f"'input_ids' holds a number that is no token id; the largest is 1{'0' * 79}"),
        ({"input_ids": [5], "labels": [5, 6]}, "'labels' has 2 items for 1 'input_ids'; one each is needed"),
        (
            {"input_ids": [5, 6, 7], "labels": [6, 7, N]},
            "'labels' are shifted: each is the next position's token; give",
        ),
        ({"input_ids": [5, 6, 7, 0], "labels": [N, 7, 0, 0], "attention_mask": [1, 1, 1, 0]}, "'labels' are shifted: "),
        ({"input_ids": [5], "labels": [True]}, "'labels' is a list of bool; a list of whole numbers is needed"),
        ({"input_ids": [5], "loss_mask": []}, "'loss_mask' has 0 items for 1 'input_ids'; one each is needed"),
        ({"input_ids": [5], "loss_mask": [0.5]}, "'loss_mask' is a list of float; a list of whole numbers is needed"),
        (
            {"input_ids": [5], "loss_mask": [5]},
            "'loss_mask' holds other values than 0 and 1; it must be 1 where a token",
        ),
        ({"input_ids": [5], "attention_mask": [1, 1]}, "'attention_mask' has 2 items for 1 'input_ids'; one each"),
        (
            {"input_ids": [5, 6], "attention_mask": [1, 2]},
            "'attention_mask' holds other values than 0 and 1; it must be 0",
        ),
        ({"input_ids": [5], "attention_mask": [0]}, "'attention_mask' is 0 everywhere; remove the row"),
    ],
}


@pytest.mark.parametrize(
    ("form", "row", "message"), [(form, row, message) for form, cases in BAD.items() for row, message in cases]
)
def test_what_is_wrong_with_a_row(form: str, row: Any, message: str) -> None:
    with pytest.raises(BadRow, match=re.escape(message)) as caught:
        FORMATS[form].read(row)
    str(caught.value).encode()  # can be printed and written to a file


@pytest.mark.parametrize("form", ["messages", "sharegpt", "alpaca"])
def test_structures_may_be_json_in_a_text(form: str) -> None:
    """As columns of Parquet and CSV hold them."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    rows: dict[str, tuple[dict[str, Any], str]] = {
        "messages": (chat(ASK, turn("assistant", "", tool_calls=[call])), "messages"),
        "sharegpt": (share(("human", "q"), ("gpt", "a")), "conversations"),
        "alpaca": ({"instruction": "q", "output": "a", "history": [["b", "c"]]}, "history"),
    }
    row, column = rows[form]
    wanted = FORMATS[form].read(row)
    assert FORMATS[form].read({**row, column: json.dumps(row[column])}) == wanted
    if form == "messages":
        with_text = chat(ASK, turn("assistant", "", tool_calls=json.dumps([call])))
        assert FORMATS[form].read(with_text) == wanted


def test_a_row_nested_as_deep_as_json_can_be() -> None:
    for depth in range(880, 1000):
        try:
            deep = json.loads("[" * depth + "]" * depth)
        except RecursionError:
            break
        for row in (chat(ASK, turn("assistant", "a", train=deep)), chat(turn("user", [{"type": deep}]), SAY)):
            with pytest.raises(BadRow, match="is a list of list; it must be|of type a list of list; only text"):
                FORMATS["messages"].read(row)


# --- which format, which columns --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("columns", "form"),
    [
        ("instruction output text", "alpaca"),
        ("instruction prompt completion", "prompt_completion"),
        ("prompt text", "completion"),
        ("messages input_ids labels", "tokenized"),
        ("conversations system text", "sharegpt"),
        ("conversations messages", "messages"),
        ("instruction history", "alpaca"),
        ("completion id", "prompt_completion"),
    ],
)
def test_the_format_follows_from_the_columns(columns: str, form: str) -> None:
    assert find_format(dict.fromkeys(columns.split(), "x")) == form


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"id": 3, "score": 1},
            "has the columns 'id', 'score', which no format knows (tokenized needs",
        ),
        ({}, "has the columns none, which no format knows"),
        ({"conversations": [ASK, SAY]}, "has turns of role and content; give --data.columns '{messages: conv"),
    ],
)
def test_no_format_fits(row: Any, message: str) -> None:
    with pytest.raises(BadRow, match=re.escape(message)):
        find_format(row)


def test_an_empty_conversation_is_sharegpt() -> None:
    assert find_format({"conversations": []}) == "sharegpt"


def test_the_columns_that_the_message_asks_for_are_taken() -> None:
    assert find_format({"conversations": [ASK, SAY], "messages": "conversations"}) == "messages"


@pytest.mark.parametrize(
    ("form", "columns", "row", "example"),
    [
        ("alpaca", {"instruction": "question", "output": "answer"}, {"question": "q", "answer": "a"}, Chat([ASK, SAY])),
        # The names may change places, and an unneeded column of the format's name is overruled.
        (
            "alpaca",
            {"instruction": "output", "output": "instruction"},
            {"output": "q", "instruction": "a"},
            Chat([ASK, SAY]),
        ),
        ("alpaca", {"instruction": "title"}, {"title": "q", "instruction": "other", "output": "a"}, Chat([ASK, SAY])),
        # A mapped column that a row lacks is one that the row lacks.
        ("alpaca", {"input": "context"}, {"instruction": "q", "output": "a"}, Chat([ASK, SAY])),
        # What is mapped is no longer what it was called.
        ("alpaca", {"instruction": "input"}, {"input": "q", "output": "a"}, Chat([ASK, SAY])),
        ("messages", {"messages": "conversations"}, {"conversations": [ASK, SAY]}, Chat([ASK, SAY])),
        ("completion", {"text": "body"}, {"body": "t", "id": 1}, Text("t")),
        (
            "tokenized",
            {"input_ids": "tokens", "loss_mask": "mask"},
            {"tokens": [5, 6], "mask": [0, 1]},
            Tokens([5, 6], [N, 6]),
        ),
    ],
)
def test_columns_are_renamed(form: str, columns: dict[str, str], row: Any, example: Example) -> None:
    before = dict(row)
    assert Tokenization(make_tokenizer(), form, columns).example(row) == example
    assert row == before


def test_options_of_a_row_may_be_in_a_column_of_another_name() -> None:
    tokenization = Tokenization(make_tokenizer(), "alpaca", {"output": "answer", "chat_template_kwargs": "how"})
    example = tokenization.example({"instruction": "q", "answer": "a", "how": {"enable_thinking": False}})
    assert example == Chat([ASK, SAY], options={"enable_thinking": False})


def test_a_column_that_is_not_there() -> None:
    tokenization = Tokenization(make_tokenizer(), "alpaca", {"instruction": "qestion"})
    with pytest.raises(
        BadRow, match=re.escape("has no 'instruction'; each row needs it (columns here: 'question', 'out")
    ):
        tokenization.example({"question": "q", "output": "a"})


def test_a_system_prompt_is_for_conversations_that_bring_none() -> None:
    def example(form: str, row: Any) -> Example:
        return Tokenization(make_tokenizer(), form, system="s").example(row)

    marked = chat(turn("user", "q", train=True), turn("assistant", "a", train=False))
    assert example("messages", marked) == Chat([turn("system", "s"), ASK, SAY], None, {1: True, 2: False})
    for role in ("system", "developer"):
        assert example("messages", chat(turn(role, "t"), ASK, SAY)) == Chat([turn(role, "t"), ASK, SAY])
    assert example("completion", {"text": "t"}) == Text("t")


def test_what_is_not_read_is_said() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    tokenization = Tokenization(tokenizer, "messages", {"messages": "talk"})
    named = {"talk": [turn("user", "q", name="Ann"), SAY], "system": "s", "label": 0, "id": "3"}
    encoded = tokenization.encode([named, {"talk": [ASK, SAY], "label": 1, "empty": "", "source": "web"}])
    assert tokenization.describe(encoded.notes, 2)[1:] == [
        "columns that the model does not see: 'label' (in 2 rows), 'source' (in 1 row)",
        "keys of turns that the chat template of '' does not use: 'name' (in 1 row)",
    ]


@pytest.mark.parametrize(
    "text", [{"text": "great", "label": "good"}, {"prompt": "p", "completion": "c", "system": "s"}]
)
def test_a_column_of_conversations_is_not_read_beside_texts(text: Any) -> None:
    tokenization = Tokenization(make_tokenizer(), find_format(text))
    *_, unread = text
    assert tokenization.describe(tokenization.encode([text]).notes, 1) == [
        f"columns that the model does not see: {unread!r} (in 1 row)"
    ]


def test_of_many_columns_some_are_named() -> None:
    tokenization = Tokenization(make_tokenizer(), "completion")
    encoded = tokenization.encode([{"text": "t", **{f"c{number}": 1 for number in range(10)}}])
    (line,) = tokenization.describe(encoded.notes, 1)
    assert line.endswith("'c7' (in 1 row), 2 more")
