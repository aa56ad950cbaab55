"""Turns of rendered conversations."""

import pytest
from byte_tokenizer import CHAT
from lit_callbacks.output.chat_text import split_turns

LLAMA = (
    "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
)
RENDERED = {
    "ChatML": (CHAT, ["user", "assistant"]),
    "Llama 3": (LLAMA, ["", "system", "user", "assistant"]),
    "Gemma": (
        "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\nYes<end_of_turn>",
        ["", "user", "model"],
    ),
    "gpt-oss": (
        "<|start|>user<|message|>Hi<|end|><|start|>assistant<|channel|>final<|message|>Yes<|return|>",
        ["user", "assistant"],
    ),
    "Phi": ("<|user|>\nHi<|end|>\n<|assistant|>\nYes", ["<|user|>", "<|assistant|>"]),
    "DeepSeek": ("<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜>Yes", ["", "<｜User｜>", "<｜Assistant｜>"]),
    "Mistral": ("<s>[INST] Hi [/INST] Yes</s>", [""]),
    "plain": ("The user asked <b>why</b> [1] | <a|b>\nassistant: so", [""]),
    "empty": ("", []),
}


@pytest.mark.parametrize("name", RENDERED)
def test_turns_and_their_roles(name: str) -> None:
    text, roles = RENDERED[name]
    turns = split_turns(text)
    assert "".join(part.text for turn in turns for part in turn) == text
    assert ["".join(part.text for part in turn if part.kind == "role") for turn in turns] == roles


def test_special_tokens_are_told_apart() -> None:
    special = [part.text for name in ("ChatML", "Mistral", "plain") for turn in split_turns(RENDERED[name][0])
               for part in turn if part.kind == "special"]  # fmt: skip
    assert special == ["<|im_start|>", "<|im_end|>"] * 2 + ["<s>", "[INST]", "[/INST]", "</s>"]
