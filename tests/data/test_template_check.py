"""Comparison of training's tokens with those of ``apply_chat_template``: place, both sides, number of conversations."""

import logging
from typing import Any

import pytest
from shared_fixtures import WORDS, make_tokenizer

from benchmarks.workload import train_tokenizer
from lit_ft.data.template_check import compare_with_template
from lit_ft.data.tokens.tokenization import Tokenization
from lit_ft.errors import BadRow

COLON = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + ':' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant:' }}{% endif %}"""


def turns(*texts: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]}


def test_a_merge_across_the_border_of_prompt_and_answer_is_found() -> None:
    """The answer begins with a bracket, and the tokenizer has a token for a colon and a bracket."""
    tokenizer = train_tokenizer([" ".join(WORDS), *["red:) book:)"] * 99], vocab_size=320)
    tokenizer.chat_template = COLON
    (both,), (colon,), (bracket,), (red,) = (tokenizer(text)["input_ids"] for text in (":)", ":", ")", "red"))
    rows = [("a.json, row 1", turns("a", "b")), ("a.json, row 2", turns("a", "b", "c", ")red"))]
    found = compare_with_template(Tokenization(tokenizer, "messages"), [*rows, ("a.json, row 3", BadRow("no"))])
    assert (found.count, found.other_text, found.other_prompt) == (2, [], [])
    at = len(tokenizer.apply_chat_template(rows[1][1]["messages"][:3], add_generation_prompt=True)["input_ids"])
    end, (line,) = tokenizer.eos_token_id, tokenizer("\n")["input_ids"]
    (place,) = found.other_tokens
    assert place == (
        f"a.json, row 2, turn 4, token {at}: trained are ':)red<|im_end|>' {[colon, bracket, red, end]}, the template "
        f"has ':)red<|im_end|>\\n' {[both, red, end, line]}"
    )
    assert found.facts("a") == {
        "template round trip, a": "2 of 2 conversations",
        "tokens of apply_chat_template, a": "1 of 2 conversations; 2 follow the prompt of predict",
    }
    (line,) = found.warnings("a")
    assert line.startswith("a: 1 of 2 conversations: other tokens than apply_chat_template gives for all turns thr")
    assert line.endswith(place)


def test_every_token_may_be_supervised_and_other_rows_have_no_template() -> None:
    tokenizer = make_tokenizer()
    for supervise in ("assistant", "last", "all"):
        made = Tokenization(tokenizer, "messages", supervise=supervise)  # type: ignore[arg-type]
        found = compare_with_template(made, [("row 1", turns("a", "b", "c", "d")), ("row 2", turns("a"))])
        assert (found.count, found.warnings("a")) == (1, [])
    assert compare_with_template(Tokenization(tokenizer, "completion"), [("row 1", {"text": "a"})]).facts("a") == {}


def test_text_beyond_the_length_of_the_tokenizer_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Training truncates it, and nothing runs it through the model."""
    tokenizer = train_tokenizer([" ".join(WORDS)], vocab_size=320)
    tokenizer.chat_template, tokenizer.model_max_length = COLON, 4
    caplog.set_level(logging.WARNING)
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        found = compare_with_template(Tokenization(tokenizer, "messages"), [("a.json, row 1", turns("a", "red book"))])
    finally:
        logger.removeHandler(caplog.handler)
    assert (found.count, caplog.messages) == (1, [])
