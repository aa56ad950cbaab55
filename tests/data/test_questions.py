"""Rows become questions, with answers or without; those without get the prompt that they would have with one."""

from pathlib import Path
from typing import Any

import pytest
from shared_fixtures import make_tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerBase

from lit_ft import RecipeError, Source
from lit_ft.data.questions import questions_of
from lit_ft.data.tokens.preparation import Preparation


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return make_tokenizer()


USER = {"role": "user", "content": "the red book"}
HUMAN = {"from": "human", "value": "the red book"}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": {}}}]}
RESULT = {"role": "tool", "content": "a cup"}


@pytest.mark.parametrize(
    ("row", "answered"),
    [
        ({"instruction": "the red book"}, {"output": "cup"}),
        ({"instruction": "the red book", "output": ""}, {"output": "cup"}),
        ({"instruction": "the red book", "output": None, "history": [["a", "b"]]}, {"output": "cup"}),
        ({"messages": [USER]}, {"messages": [USER, {"role": "assistant", "content": "cup"}]}),
        (
            {"messages": [USER, {"role": "assistant", "content": ""}]},
            {"messages": [USER, {"role": "assistant", "content": "cup"}]},
        ),
        (
            {"messages": [USER, CALL, RESULT]},
            {"messages": [USER, CALL, RESULT, {"role": "assistant", "content": "cup"}]},
        ),
        (
            {"messages": [USER, {"role": "gpt", "content": ""}]},
            {"messages": [USER, {"role": "assistant", "content": "cup"}]},
        ),
        ({"conversations": [HUMAN]}, {"conversations": [HUMAN, {"from": "gpt", "value": "cup"}]}),
        ({"prompt": "the red book"}, {"completion": "cup"}),
        ({"prompt": [USER], "completion": []}, {"completion": [{"role": "assistant", "content": "cup"}]}),
    ],
)
def test_the_prompt_is_that_of_the_row_with_an_answer(
    row: dict[str, Any], answered: dict[str, Any], tokenizer: PreTrainedTokenizerBase, write_rows: Any
) -> None:
    preparation = Preparation(tokenizer)
    (asked,) = questions_of(preparation, Source(write_rows([row], "asked.json")))
    (known,) = questions_of(preparation, Source(write_rows([row | answered], "known.json")))
    assert (asked["expected"], known["expected"]) == (None, "cup")
    assert (asked["prompt"], asked["question"]) == (known["prompt"], known["question"])


def test_a_raw_question_begins_as_raw_text_does_in_training(write_rows: Any) -> None:
    tokenizer, opening = make_tokenizer(), "<|im_start|>"
    tokenizer.bos_token = opening
    post = TemplateProcessing(single=f"{opening} $A", special_tokens=[(opening, tokenizer.bos_token_id)])
    tokenizer.backend_tokenizer.post_processor = post
    (asked,) = questions_of(Preparation(tokenizer), Source(write_rows([{"prompt": "the red book"}])))
    assert (asked["prompt"], asked["question"]) == (f"{opening}the red book", "the red book")
    row = {"prompt": f"{opening}the red book", "completion": f" cup{tokenizer.eos_token}"}
    (asked,) = questions_of(Preparation(tokenizer), Source(write_rows([row], "marked.json")))
    assert (asked["prompt"], asked["expected"]) == (f"{opening}the red book", " cup")


def test_an_earlier_answer_is_not_the_expected_one(tokenizer: PreTrainedTokenizerBase, write_rows: Any) -> None:
    turns = [USER, {"role": "assistant", "content": "cup"}, {"role": "user", "content": "a lamp"}]
    (asked,) = questions_of(Preparation(tokenizer), Source(write_rows([{"messages": turns}])))
    assert (asked["question"], asked["expected"]) == ("a lamp", None)
    assert "cup" in asked["prompt"]


def test_ids_and_columns(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    path = tmp_path / "asked.csv"
    path.write_text("id,ask\nq-7,the red book\n,a lamp\n")
    source = Source(str(path), columns={"instruction": "ask", "output": "reply"})
    asked = questions_of(Preparation(tokenizer), source)
    assert [one["question"] for one in asked] == ["the red book", "a lamp"]
    assert asked[0]["id"] == "q-7"
    assert str(asked[1]["id"]).startswith(str(path))


def test_rows_without_a_question_are_counted(
    tokenizer: PreTrainedTokenizerBase, write_rows: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert questions_of(Preparation(tokenizer), Source(write_rows([{"text": "a lamp"}]))) == []
    assert "1 of 1 row without a question, text or tokens alone; left out" in caplog.text
    bad = write_rows([{"instruction": "a lamp"}, {"instruction": 3}], "bad.json")
    with pytest.raises(RecipeError, match="bad.json.*2.*'instruction'"):
        questions_of(Preparation(tokenizer), Source(bad))
    assert len(questions_of(Preparation(tokenizer, on_bad_row="skip"), Source(bad))) == 1
    said = f"1 of 2 rows cannot be used, skipped (data.on_bad_row=skip): {bad}, row 2: 'instruction' is an int"
    assert said in caplog.text
