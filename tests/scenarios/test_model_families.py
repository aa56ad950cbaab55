"""What the published templates of seven families make of conversations: the tokens of training against those of
``apply_chat_template``, prompts, ends, dates, doubled BOS, and turns that a template changes or lacks."""

import copy
import json
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_families import CHAT, FAMILIES, family_tokenizer, save_family
from transformers import AutoModelForCausalLM, AutoTokenizer

from lit_ft import RecipeError
from lit_ft.data.questions import questions_of
from lit_ft.data.template_check import compare_with_template
from lit_ft.data.text.sources import Source
from lit_ft.data.tokens.preparation import Preparation
from lit_ft.data.tokens.tokenization import Tokenization
from lit_ft.export.folder_texts import generation_texts
from lit_ft.model.generation import end_of_call, has_marks
from lit_ft.packed_batch import IGNORE_INDEX

TOOL = {
    "type": "function",
    "function": {
        "name": "find",
        "description": "seek",
        "parameters": {"type": "object", "properties": {"what": {"type": "string"}}},
    },
}
CALL = {"type": "function", "id": "call00001", "function": {"name": "find", "arguments": {"what": "杯子"}}}


def thought(content: str, thinking: str, **more: Any) -> dict[str, Any]:
    """Answer with thinking under the keys that Qwen and gpt-oss read."""
    return {"role": "assistant", "content": content, "reasoning_content": thinking, "thinking": thinking, **more}


CHATS: dict[str, dict[str, Any]] = {
    "a system prompt": {"messages": CHAT},
    "no system prompt": {"messages": CHAT[1:]},
    "thinking": {"messages": [CHAT[1], thought("a lamp", "red"), CHAT[3], thought("the cup", "blue")]},
    "tools": {
        "tools": [TOOL],
        "messages": [
            CHAT[1],
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "name": "find", "tool_call_id": "call00001", "content": "red"},
            {"role": "assistant", "content": "red"},
            CHAT[3],
            {"role": "assistant", "content": "yes"},
        ],
    },
    "tools and thinking": {
        "tools": [TOOL],
        "messages": [
            CHAT[1],
            thought("", "seek it", tool_calls=[CALL]),
            {"role": "tool", "name": "find", "tool_call_id": "call00001", "content": "red"},
            thought("red", "it is red"),
        ],
    },
}
THINKING = {"enable_thinking": True}
OPTIONS: dict[str, dict[str, Any] | None] = {"qwen3_5": THINKING}
NO_TOOLS = ("gemma3", "deepseek_moe")
"""Families whose templates have no tools, which are spelled out (tests/data/test_rendering.py)."""
CHATS["tools and a system prompt"] = {
    **CHATS["tools"],
    "messages": [{"role": "system", "content": "the cup is red"}, *CHATS["tools"]["messages"]],
}
WRITTEN_OTHERWISE = {
    ("gpt_oss", "tools and thinking"),
    ("mistral", "a system prompt"),
    ("mistral", "tools and a system prompt"),
}
"""Here all turns through an answer, at once, are other tokens than the prompt of inference and the answer."""


def tokenization(family: str, options: dict[str, Any] | None = None, **more: Any) -> Tokenization:
    return Tokenization(family_tokenizer(family), "messages", template_options=options or OPTIONS.get(family), **more)


def answers(made: Tokenization, row: dict[str, Any]) -> list[tuple[list[int], list[int]]]:
    """Of each supervised answer, in order: the tokens before it in its sample, and its own."""
    encoded = made.encode([copy.deepcopy(row)])
    assert not encoded.bad
    cuts = np.cumsum(encoded.lengths)[:-1]
    found = []
    for ids, labels in zip(np.split(encoded.ids, cuts), np.split(encoded.labels, cuts), strict=True):
        borders = np.flatnonzero(np.diff(np.array([False, *(labels != IGNORE_INDEX), False])))
        found += [(ids[:a].tolist(), ids[a:b].tolist()) for a, b in borders.reshape(-1, 2)]
    return found


def reference(made: Tokenization, row: dict[str, Any], turns: int, prompt: bool) -> list[int]:
    """What transformers gives for the first turns; its date is today."""
    options = made.template_options or {}
    messages = copy.deepcopy(row["messages"][:turns])
    return list(
        made.tokenizer.apply_chat_template(
            messages, row.get("tools"), add_generation_prompt=prompt, return_dict=True, **options
        )["input_ids"]
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "chat"),
    [(family, chat) for family in FAMILIES for chat in CHATS if not (chat.startswith("tools") and family in NO_TOOLS)],
)
def test_training_sees_the_tokens_of_the_template(family: str, chat: str) -> None:
    made, row = tokenization(family), CHATS[chat]
    turns = [i for i, message in enumerate(row["messages"]) if message["role"] == "assistant"]
    found = answers(made, row)
    assert len(found) == len(turns)
    ends = made.tokenizer.convert_tokens_to_ids(FAMILIES[family].ends.split())
    for turn, (before, answer) in zip(turns, found, strict=True):
        assert before == reference(made, row, turn, prompt=True), "the prompt of inference"
        whole = reference(made, row, turn + 1, prompt=False)
        is_equal = whole[: len(before + answer)] == before + answer
        assert is_equal or (family, chat) in WRITTEN_OTHERWISE
        assert answer[-1] in ends, "generation would not stop there"
        if (bos := made.tokenizer.bos_token_id) is not None:
            assert (before + answer).count(bos) == 1
    compared = compare_with_template(made, [("a.json, row 1", copy.deepcopy(row))])
    assert (compared.count, compared.other_text, compared.other_prompt) == (1, [], [])
    assert bool(compared.other_tokens) == ((family, chat) in WRITTEN_OTHERWISE)


SUPERVISED = {
    "qwen3": ["<think>\nseek it\n</think>\n\n<tool_call>", "<think>\nit is red\n</think>\n\nred<|im_end|>"],
    "qwen3_5": ["seek it\n</think>\n\n<tool_call>", "it is red\n</think>\n\nred<|im_end|>"],
    "llama3": ['{"name": "find", "parameters": {"what": "杯子"}}<|eot_id|>', "red<|eot_id|>"],
    "gpt_oss": [
        "<|channel|>analysis<|message|>seek it<|end|><|start|>assistant to=functions.find",
        "<|channel|>analysis<|message|>it is red<|end|><|start|>assistant<|channel|>final<|message|>red<|return|>",
    ],
    "mistral": ['[TOOL_CALLS] [{"name": "find", "arguments": {"what": "杯子"}, "id": "call00001"}]</s>', " red</s>"],
}


@pytest.mark.parametrize("family", SUPERVISED)
def test_calls_and_thinking_are_trained_as_the_family_writes_them(family: str) -> None:
    made = tokenization(family)
    found = [made.tokenizer.decode(answer) for _, answer in answers(made, CHATS["tools and thinking"])]
    assert [text[: len(wanted)] for text, wanted in zip(found, SUPERVISED[family], strict=True)] == SUPERVISED[family]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_prompt_of_predict_begins_the_sample(family: str, write_rows: Any) -> None:
    made, row = tokenization(family), CHATS["no system prompt"]
    preparation = Preparation(made.tokenizer, template_options=made.template_options)
    (question,) = questions_of(preparation, Source(write_rows([row])))
    ids = made.tokenizer(question["prompt"], add_special_tokens=False)["input_ids"]
    before, _ = answers(made, row)[-1]
    assert ids == before


EXPECTED = {
    "qwen3": "<think>\nblue\n</think>\n\nthe cup",
    "gpt_oss": "<|channel|>analysis<|message|>blue<|end|><|start|>assistant<|channel|>final<|message|>the cup",
    "gemma3": "the cup",
    "llama3": "the cup",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_show_the_special_tokens_that_their_template_writes(family: str) -> None:
    assert has_marks(family_tokenizer(family)) == (family in ("gpt_oss", "mistral"))


@pytest.mark.parametrize("family", EXPECTED)
def test_predict_expects_what_training_supervises_without_its_end(family: str, write_rows: Any) -> None:
    made, row = tokenization(family), CHATS["thinking"]
    (question,) = questions_of(Preparation(made.tokenizer), Source(write_rows([row])))
    assert question["expected"] == EXPECTED[family]
    end = FAMILIES[family].ends.split()
    _, answer = answers(made, row)[-1]
    assert made.tokenizer.decode(answer) in [EXPECTED[family] + one for one in end]


ENDS_OF_CALLS = {"qwen3": "<|im_end|>", "qwen3_5": "<|im_end|>", "gpt_oss": "<|call|>", "mistral": "</s>"}


@pytest.mark.parametrize("family", FAMILIES)
def test_generation_stops_where_a_call_ends(family: str) -> None:
    made = tokenization(family)
    assert end_of_call(made.tokenizer) == ([ENDS_OF_CALLS[family]] if family in ENDS_OF_CALLS else [])
    if family in ENDS_OF_CALLS:
        (_, call), _, _ = answers(made, CHATS["tools"])
        assert made.tokenizer.decode(call[-1:]) == ENDS_OF_CALLS[family]


def test_an_exported_model_stops_at_all_ends_of_a_turn(tmp_path: Path) -> None:
    folder = save_family("gpt_oss", tmp_path / "model")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert generation_texts(model, tokenizer) == {}
    ids = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|return|>", "<|call|>"])
    model.generation_config.eos_token_id = ids[0]
    texts = generation_texts(model, tokenizer)
    assert json.loads(texts["generation_config.json"])["eos_token_id"] == ids


def test_a_token_that_closes_each_call_ends_no_turn() -> None:
    tokenizer = family_tokenizer("gpt_oss")
    of_calls = "{% for c in messages[-1].tool_calls or [] %}<|start|>{{ c.function.name }}<|end|>{% endfor %}"
    for behind, ends in (("", []), ("<|call|>\n", ["<|call|>"])):
        tokenizer.chat_template = of_calls + behind
        assert end_of_call(tokenizer) == ends


@pytest.mark.parametrize(("family", "has_option"), [("llama3", True), ("gpt_oss", False)])
def test_the_date_of_a_template_is_said_and_can_be_fixed(family: str, has_option: bool) -> None:
    row = CHATS["no system prompt"]
    today = Tokenization(family_tokenizer(family), "messages")
    encoded = today.encode([row])
    assert encoded.notes["dated"] == 1
    (line,) = [line for line in today.describe(encoded.notes, 1) if "date" in line]
    assert line.endswith(f"the same on every day with data.template_options={{strftime_now: {date.today()}}}")
    fixed = tokenization(family, {"strftime_now": "2001-02-03"})
    assert fixed.encode([row]).notes["dated"] == 0
    text = fixed.tokenizer.decode(answers(fixed, row)[0][0])
    assert ("03 Feb 2001" if family == "llama3" else "2001-02-03") in text
    if has_option:
        assert tokenization(family, {"date_string": "26 Jul 2024"}).encode([row]).notes["dated"] == 0
    with pytest.raises(RecipeError, match="strftime_now='soon' must be a date, e.g. 20"):
        tokenization(family, {"strftime_now": "soon"}).encode([row])


def test_a_family_without_system_role_has_the_system_prompt_in_its_first_turn() -> None:
    made = tokenization("gemma3")
    (before, _), _ = answers(made, CHATS["a system prompt"])
    assert made.tokenizer.decode(before) == (
        "<bos><start_of_turn>user\nthe cup is red\n\n红 book<end_of_turn>\n<start_of_turn>model\n"
    )


def test_thinking_under_a_prompt_that_closes_it_is_said() -> None:
    made = tokenization("qwen3_5", {"enable_thinking": False})
    row = CHATS["thinking"]
    assert made.encode([copy.deepcopy(row)]).notes["other opening"] == 2
    (line,) = compare_with_template(made, [("a.json, row 1", row)] * 3).warnings("a")
    assert line.startswith("a: 3 of 3 conversations: an answer that does not follow the prompt of predict, e.g. a.js")
    assert "a.json, row 1, turn 2, token " in line
    assert "trained are 'red\\n" in line
    assert "the template has '\\n</th" in line
