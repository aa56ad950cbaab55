"""Files of a tokenizer that transformers 4 reads too, and servers and converters that stand on it."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CLASSES = {"TokenizersBackend": "PreTrainedTokenizerFast"}
"""Names of classes of transformers 5 that transformers 4 lacks, each with one that both have for it."""


def save_tokenizer(tokenizer: "PreTrainedTokenizerBase", folder: Path) -> None:
    """Save a tokenizer under names that transformers 4 and 5 read.

    transformers 5 writes special tokens as a list where 4 reads a mapping, which ends there in an AttributeError.
    """
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    if not file.is_file():
        return
    config = json.loads(file.read_text(encoding="utf-8"))
    if isinstance(special := config.get("extra_special_tokens"), list):
        del config["extra_special_tokens"]
        config["additional_special_tokens"] = special
    name = config.get("tokenizer_class")
    config["tokenizer_class"] = _CLASSES.get(name, name)
    file.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
