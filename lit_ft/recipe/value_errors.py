"""Reasons in jsonargparse's messages about values: which value, what is allowed, and what was probably meant."""

import re
from difflib import get_close_matches


def reasons(message: str) -> str:
    """Reasons in a jsonargparse message, without the types that it tried and the values that it repeats."""
    message = re.sub(r"Type typing.Callable\[.*?\] expects a function or a callable class: ", "", message)
    message = re.sub(r"[Ee]xpected (a )?<class '([\w.]+)'>", r"expected \2", message)
    message = re.sub(r"[Ee]xpected a typing.Literal\[", "expected one of [", message)
    message = re.sub(r"unhashable type: .*|argument of type .* is not iterable", "class_path must be a text", message)
    parts = [part.strip(" -") for line in message.splitlines() for part in line.split("; ")]
    parts = [re.sub(r"\.? Got value: ?([\[{]|Namespace).*", "", part) for part in parts if part]
    parts = [part for part in parts if not part.startswith(_NOISE)] or [message.strip()]
    # Where no class was named, the types are the only reasons.
    is_told = any(not part.startswith((*_TYPES, "Given value", "expected ")) for part in parts)
    telling = [part for part in parts if not (is_told and part.startswith((*_TYPES, "expected ")))]
    text = "; ".join(dict.fromkeys(shortened(part, 200) for part in telling))
    if (held := _CONTAINER.search(message)) is not None and re.fullmatch(r"expected \w+", text):
        text += f". Given value: {held[1]}"
    return shortened(_of_simple_types(text), 600)


_CONTAINER = re.compile(r"(?:Given|Got) value: ([\[{].*)")


def _of_simple_types(text: str) -> str:
    """Explanation of a value that is none of some words and no number, from jsonargparse's list of types."""
    if (below := re.match(r"Not of type PositiveInt: .*Given value: (.*)", text)) is not None:
        return f"{shortened(below[1], 100)} must be 1 or more"
    match = re.fullmatch(r"(expected .*?)[;.] (?:Got value: |Given value: )(.*)", text)
    if match is None:
        return text
    types, value = match[1], shortened(match[2].rpartition("; Given value: ")[2], 100)
    words = [
        word for listed in re.findall(r"one of \[(.*?)\](?:;|$)", types) for word in re.findall(r"'(.*?)'", listed)
    ]
    plain = set(re.findall(r"expected (\w+)(?:;|$)", types))
    if words:
        words += ["true", "false"] if "bool" in plain else []
        meant = [_OTHER_WORDS.get(value.lower(), "")] if _OTHER_WORDS.get(value.lower()) in words else []
        near = meant or get_close_matches(value.lower(), words, n=1)
        advice = f"; did you mean {near[0]}?" if near else ""
        if "q8_0" in words and _SMALL_TYPE.fullmatch(value):
            advice = "; llama.cpp's llama-quantize makes smaller types of f16 (docs/export.md)"
        return f"{value!r} is none of {', '.join(words)}{advice}"
    if plain and plain <= {"int", "float", "bool"} and plain != {"bool"}:
        return no_number(value, whole="float" not in plain)
    if len(plain) == 1 and (kind := plain.pop()) in _KINDS:
        held = value.startswith(("[", "{"))
        if kind == "str" and not held:
            return f"{value!r} is no text; put it in quotes (YAML reads yes, no, on and off as true and false)"
        example = f": [{value}]" if kind in ("list", "tuple") and not held else ""
        return f"{value if held else repr(value)} is {_KINDS[kind]}{example}"
    return text


_KINDS = {
    "bool": "neither true nor false",
    "dict": "no mapping; give names and values: {name: value}",
    "float": "no number",
    "int": "no whole number",
    "list": "no list; write one",
    "str": "no text; write one value without brackets",
    "tuple": "no list; write one",
}
_SMALL_TYPE = re.compile(r"i?q[1-6]_\w+", re.IGNORECASE)
"""Types of GGUF's weights below 8 bits."""
_OTHER_WORDS = {
    "bf16": "bfloat16",
    "chat_template": "messages",
    "chatml": "messages",
    "default": "assistant",
    "delete": "drop",
    "float": "float32",
    "fp16": "16-mixed",
    "fp32": "float32",
    "half": "float16",
    "instruct": "alpaca",
    "interleave_over": "all_exhausted",
    "interleave_under": "first_exhausted",
    "last_round": "last",
    "openai": "messages",
    "raise": "error",
}
"""Other trainers' words for values."""


def no_number(value: str, whole: bool) -> str:
    """Message about a value that is no number, with the number that was probably meant.

    Args:
        value: the value, as it was typed.
        whole: whether a whole number is needed.
    """
    kind = "whole number" if whole else "number"
    advice = ""
    if (share := re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", value)) is not None and not whole:
        advice = f"; write {float(share[1]) / 100:g}"
    elif (thousands := re.fullmatch(r"(\d+)k", value, re.IGNORECASE)) is not None:
        advice = f"; write {thousands[1]}000"
    elif re.fullmatch(r"\d+,\d+", value) and not whole:
        advice = f"; write {value.replace(',', '.')}"
    elif whole and re.fullmatch(r"\d+\.?\d*([eE]\+?\d{1,2})?", value) and float(value).is_integer():
        advice = f"; write {int(float(value))}"
    shown = shortened(value, 100)
    return f"{shown if value.startswith(('[', '{')) else repr(shown)} is no {kind}{advice}"


def shortened(text: str, length: int) -> str:
    """Cut a text to at most ``length`` characters, with ``...`` at the end."""
    return text if len(text) <= length else f"{text[: length - 3]}..."


_NOISE = (
    "Parser key",
    "Expected a path but",
    "Does not validate",
    "Subtypes",
    "Errors:",
    "expected NoneType",
    "Problem with given class_path",
    "Given value type",
    "Given value: Namespace",
    "Given value: {",
    "Given value: [",
    "Subclass types expect one of",
    "a class path (str)",
    "a dict with",
    "Given value: NestedArg",
    "Not of type pissa_niter_N",
)
"""Beginnings of message lines in which jsonargparse lists types and values."""
_TYPES = ("Not a valid subclass of", "Expected an instantiatable class")
"""Beginnings of message lines about the classes that an option allows."""
