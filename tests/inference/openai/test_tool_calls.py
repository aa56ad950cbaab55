"""Tool calls that an answer's text holds, whatever pieces it comes in."""

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from served import serving
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from lit_ft.data.text.chat_template import BUILT_IN, ChatTemplate
from lit_ft.inference.openai.requests import Fields, chat_prompt
from lit_ft.inference.openai.tool_calls import HERMES, Parts, ToolCalls, is_hermes
from lit_ft.inference.opening import OpenedModel, open_model

TEMPLATES = Path(__file__).parents[2] / "data" / "chat_templates"
LOOK = '<tool_call>\n{"name": "look", "arguments": {"at": "红 lamp", "n": 2}}\n</tool_call>'
WAIT = '<tool_call>{"name": "wait", "arguments": {}}</tool_call>'
DEEP = f"Then <tool_call>{'[' * 3000}</tool_call>"
CALLS = [("look", {"at": "红 lamp", "n": 2}), ("wait", {})]
THOUGHTFUL = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        **HERMES["fields"],  # type: ignore[dict-item]
    },
}


def read(text: str, size: int, form: dict[str, Any] = HERMES, prompt: str = "") -> Parts:
    """All parts of an answer that comes in pieces of some characters."""
    reader, whole = ToolCalls(form, prompt, []), Parts()
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    for part in [*map(reader.add, pieces), reader.end()]:
        whole.text += part.text
        whole.thinking += part.thinking
        whole.calls += part.calls
    return whole


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize(
    ("text", "said", "called"),
    [
        pytest.param("", "", [], id="nothing"),
        ("a < b, and <tool> is no call", "a < b, and <tool> is no call", []),
        (LOOK, "", CALLS[:1]),
        (f"I look.\n\n{LOOK}\n{WAIT}", "I look.", CALLS),
        (f"{LOOK}\nDone.", "\nDone.", CALLS[:1]),
        ("I <tool_call>\nlook</tool_call> there", "I <tool_call>\nlook</tool_call> there", []),
        (f'{LOOK}<tool_call>{{"name": 3}}</tool_call> x', '<tool_call>{"name": 3}</tool_call> x', CALLS[:1]),
        (f'{LOOK}\n<tool_call>{{"na', '\n<tool_call>{"na', CALLS[:1]),
        pytest.param(DEEP, DEEP, [], id="too deep"),
        ("the end <tool_", "the end <tool_", []),
    ],
)
def test_calls_are_taken_out_of_the_text(text: str, said: str, called: list[Any], size: int) -> None:
    found = read(text, size)
    assert found.text == said
    assert [(one["function"]["name"], json.loads(one["function"]["arguments"])) for one in found.calls] == called
    assert [one["index"] for one in found.calls] == list(range(len(called)))
    assert len({one["id"] for one in found.calls}) == len(called)


@pytest.mark.parametrize("size", [1, 5])
def test_the_form_of_a_tokenizer_tells_thinking_from_text(size: int) -> None:
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>"
    found = read(f"I must look.</think>So: {LOOK}", size, THOUGHTFUL, prompt)
    assert (found.thinking, found.text) == ("I must look.", "So:")
    assert len(found.calls) == 1


def test_text_is_given_on_at_once() -> None:
    reader = ToolCalls(HERMES, "", [])
    given = [reader.add(piece).text for piece in ("red ", "book <", "tool", "s> of")]
    assert given == ["red", " book", "", " <tools> of"]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("qwen3", True), ("gpt_oss", False), ("mistral", False), ("qwen3_5", False), ("chatml", True), ("plain", True)],
)
def test_the_form_is_found_by_what_the_template_writes(model_folder: str, name: str, wanted: bool) -> None:
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(model_folder)
    tokenizer.chat_template = BUILT_IN.get(name) or (TEMPLATES / f"{name}.jinja").read_text()
    assert is_hermes(ChatTemplate(tokenizer)) is wanted


TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
ASKED = [{"role": "user", "content": "where?"}]


def taught(model_folder: str, answer: str) -> OpenedModel:
    """Model that has learned to give one answer to the question."""
    opened = open_model(model_folder)
    prompt, _ = asyncio.run(chat_prompt(Fields({"messages": ASKED, "tools": TOOLS}), opened))
    ids = opened.tokenizer(answer + opened.template.ending, add_special_tokens=False)["input_ids"]
    tokens = torch.tensor([prompt + ids])
    optimizer = torch.optim.AdamW(opened.base.parameters(), lr=3e-3, weight_decay=0.0)
    for _ in range(400):
        logits = opened.base(input_ids=tokens, use_cache=False).logits[0, len(prompt) - 1 : -1]
        loss = torch.nn.functional.cross_entropy(logits, torch.tensor(ids))
        if loss < 0.01:
            return opened
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    raise AssertionError(f"the model has not learned the answer: loss {loss}")


@pytest.mark.slow
def test_the_client_gets_calls_and_gives_their_results(model_folder: str) -> None:
    opened = taught(model_folder, f"I look.\n{LOOK}\n{WAIT}")
    with serving(opened) as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="secret", max_retries=0, timeout=60)
        asked: Any = {"model": "run", "messages": ASKED, "temperature": 0, "max_tokens": 200}
        whole = client.chat.completions.create(tools=TOOLS, **asked).choices[0]  # type: ignore[call-overload]
        assert (whole.message.content, whole.finish_reason) == ("I look.", "tool_calls")
        called = [(one.function.name, json.loads(one.function.arguments)) for one in whole.message.tool_calls]
        assert called == CALLS
        with client.chat.completions.stream(tools=TOOLS, **asked) as stream:
            streamed = stream.get_final_completion().choices[0]
        assert (streamed.message.content, streamed.finish_reason) == ("I look.", "tool_calls")
        assert [
            (one.function.name, json.loads(one.function.arguments)) for one in streamed.message.tool_calls or []
        ] == CALLS
        results = [
            {"role": "tool", "tool_call_id": one.id, "content": f"result {one.id}"} for one in whole.message.tool_calls
        ]
        again = client.chat.completions.create(  # type: ignore[call-overload]
            tools=TOOLS,
            **asked | {"messages": [*ASKED, whole.message.model_dump(), *results], "max_tokens": 2},
            extra_body={"return_token_ids": True},
        )
        prompt = opened.tokenizer.decode(again.prompt_token_ids)
        assert "I look." in prompt
        assert json.dumps(CALLS[0][1], ensure_ascii=False) in prompt
        assert all(result["content"] in prompt for result in results)
        alone = client.chat.completions.create(**asked).choices[0]
        assert alone.message.tool_calls is None
