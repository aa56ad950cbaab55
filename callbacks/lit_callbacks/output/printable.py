"""Escaping of text from data, models and file names for a terminal."""

import re

_UNSAFE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""C0 and C1 control characters except tab and newline, line separators, direction overrides, lone surrogates."""


def printable(text: str, one_line: bool = False) -> str:
    r"""Replace control characters with escapes, e.g. ``\x1b``, so that a terminal shows and does not execute them.

    Args:
        text: any text; returned unchanged if it has no such character.
        one_line: whether to escape tabs and newlines too.
    """
    shown = _UNSAFE.sub(_escape, text)
    return re.sub(r"[\t\n]", _escape, shown) if one_line else shown


def _escape(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode("ascii")
