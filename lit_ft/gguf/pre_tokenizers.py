"""Pre-tokenizers that llama.cpp has: the name of one, from the regular expression of a tokenizer.

llama.cpp's code for each name was compared (src/llama-vocab.cpp of September 2026). A tokenizer whose expression is not
in this table would split texts in another way there than in training.
"""

from collections.abc import Mapping
from typing import Any

from lit_ft.errors import RecipeError

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_END = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_END = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"

_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _END
_ONE_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_SEED_END = r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN35_END = r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

EXPRESSIONS = {
    (_LLAMA3, True): "llama-bpe",
    (_LLAMA3, False): "smaug-bpe",
    (_CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _END, False): "qwen2",
    (_CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}" + _QWEN35_END, False): "qwen35",
    (rf"{_ONE_CASED[0]}|{_ONE_CASED[1]}|\p{{N}}|{_CASED_END}", True): "tekken",
    (
        rf"{_ONE_CASED[0]}{_CONTRACTIONS}?|{_ONE_CASED[1]}{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_CASED_END}",
        False,
    ): "gpt-4o",
    (_CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}" + _SEED_END, False): "seed-coder",
}
"""Names of llama.cpp's pre-tokenizers, by the regular expression of ``tokenizer.json`` and its ``ignore_merges``:
whether a piece that is a token stays one even if the merges would not make it."""

_BYTES = {"type": "ByteLevel", "add_prefix_space": False}
_DIGITS = {"type": "Digits", "individual_digits": True}


def pre_tokenizer_of(tokenizer_json: Mapping[str, Any]) -> str:
    """Name of llama.cpp's pre-tokenizer that splits texts as a byte-level BPE tokenizer does.

    Args:
        tokenizer_json: content of ``tokenizer.json``.

    Raises:
        RecipeError: llama.cpp has none, or it is not known here.
    """
    pre, normalizer = tokenizer_json.get("pre_tokenizer"), tokenizer_json.get("normalizer")
    if normalizer is not None and normalizer["type"] != "NFC":
        raise RecipeError(f"the tokenizer's normalizer {normalizer['type']} is not in llama.cpp; leave out --gguf")
    steps = [] if pre is None else pre.get("pretokenizers", [pre])
    splits, last = steps[:-1], steps[-1] if steps else {}
    if {name: last.get(name) for name in _BYTES} == _BYTES:
        if not splits and last.get("use_regex", True):
            return "gpt-2"
        if [{name: one.get(name) for name in _DIGITS} for one in splits] == [_DIGITS] and last.get("use_regex", True):
            return "smollm"
        if len(splits) == 1 and _is_plain_split(splits[0]) and not last.get("use_regex", True):
            expression = splits[0]["pattern"].get("Regex", "").replace("\r", r"\r").replace("\n", r"\n")
            key = expression, bool(tokenizer_json["model"].get("ignore_merges"))
            if key in EXPRESSIONS:
                return EXPRESSIONS[key]
    expressions = [str(one.get("pattern", {}).get("Regex", one["type"])) for one in steps]
    raise RecipeError(
        f"the pre-tokenizer {' then '.join(expressions) or 'of the tokenizer'} is none that is known of llama.cpp "
        f"({', '.join(sorted({*EXPRESSIONS.values(), 'gpt-2', 'smollm'}))}), so texts would be split otherwise there; "
        "leave out --gguf"
    )


def _is_plain_split(step: Mapping[str, Any]) -> bool:
    return bool(step["type"] == "Split" and step.get("behavior") == "Isolated" and not step.get("invert"))
