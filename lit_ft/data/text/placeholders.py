"""Placeholders of templates, such as ``{{name}}`` or ``{name}``, that were left in the text of rows."""

import re

_DOUBLE = r"\{\{\s*[^\W\d]\w*\s*\}\}"
# Not after a letter, a backslash or one of ^_$}: LaTeX and shells write these braces. Two letters or more: {x} is
# mathematics.
_SINGLE = r"(?<![\w\\^$}{])\{[^\W\d]\w+\}(?!\})"
_PLACEHOLDER = re.compile(f"{_DOUBLE}|{_SINGLE}")
_CODE = re.compile(
    r"""```|\bf["']|\.format\(|[;{]\s*\n|\\[a-z]+\{|^\s*(?:def|class|import|function|#include)\b""", re.MULTILINE
)


def placeholder_in(text: str) -> str | None:
    """First placeholder of a text; None if it has none, or is program code or LaTeX, which write braces themselves."""
    if "{" not in text:
        return None
    match = _PLACEHOLDER.search(text)
    return match.group() if match is not None and not _CODE.search(text) else None
