"""Saved tokenizers have the names that transformers 4 reads, and are what they were in transformers 5."""

import json
from pathlib import Path

from lit_callbacks.export.tokenizer_files import save_tokenizer
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoTokenizer, PreTrainedTokenizerFast


def test_names_that_transformers_4_reads(tmp_path: Path) -> None:
    words = Tokenizer(WordLevel({"<eos>": 0, "<a>": 1, "red": 2}, unk_token="<eos>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", extra_special_tokens=["<a>"])
    tokenizer.add_tokens([AddedToken("<b>", special=True)])
    tokenizer.chat_template = "{{ messages[0].content }}"
    save_tokenizer(tokenizer, tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert config["additional_special_tokens"] == tokenizer.extra_special_tokens
    assert "extra_special_tokens" not in config
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again.get_vocab() == tokenizer.get_vocab()
    assert again.all_special_tokens == tokenizer.all_special_tokens
    assert again.chat_template == tokenizer.chat_template
