"""A warning where answers end with a token that the base model has not learned, and that stays frozen."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from shared_fixtures import make_tokenizer, tiny_qwen2

from lit_ft import CausalLM
from lit_ft.data.text.chat_template import set_chat_template

END = make_tokenizer().convert_tokens_to_ids("<|im_end|>")


def warnings_of(
    folder: Path, recwarn: pytest.WarningsRecorder, tied: bool, options: dict[str, Any] | None
) -> list[str]:
    model, tokenizer = tiny_qwen2(tie_word_embeddings=tied)
    with torch.no_grad():
        model.get_output_embeddings().weight[END] = 0
    model.save_pretrained(folder)
    set_chat_template(tokenizer, "chatml")
    tokenizer.save_pretrained(folder)
    peft = None if options is None else LoraConfig(r=2, target_modules=["q_proj"], **options)
    module = CausalLM(str(folder), peft=peft)
    assert module.tokenizer.chat_template, "data reads the tokenizer before the model is built"
    module.configure_model()
    return [text for warning in recwarn if "answers end with" in (text := str(warning.message))]


@pytest.mark.parametrize(
    ("tied", "rows"), [(True, f"[{END}]"), (False, f"{{embed_tokens: [{END}], lm_head: [{END}]}}")]
)
def test_an_end_that_a_frozen_head_cannot_write(
    tmp_path: Path, recwarn: pytest.WarningsRecorder, tied: bool, rows: str
) -> None:
    (text,) = warnings_of(tmp_path, recwarn, tied, {})
    assert text.startswith("answers end with <|im_end|> in the chat template, for which the head of ")
    assert f"trainable_token_indices: {rows})" in text


@pytest.mark.parametrize(
    ("tied", "options"),
    [
        (True, None),
        (True, {"trainable_token_indices": [END]}),
        (False, {"trainable_token_indices": {"embed_tokens": [END], "lm_head": [END]}}),
        (False, {"modules_to_save": ["lm_head"]}),
    ],
)
def test_an_end_that_trains(
    tmp_path: Path, recwarn: pytest.WarningsRecorder, tied: bool, options: dict[str, Any] | None
) -> None:
    assert not warnings_of(tmp_path, recwarn, tied, options)
