"""Text from data, models and file names, made safe to show on a terminal."""

import re

_UNSAFE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""C0 and C1 control characters but tab and newline, separators of lines, overrides of direction, lone surrogates."""


def printable(text: str, one_line: bool = False) -> str:
    r"""Write control characters as escapes, e.g. ``\x1b``, so that a terminal shows them instead of obeying them.

    Args:
        text: anything; what has no such character is returned as it is.
        one_line: also escape tabs and newlines.
    """
    shown = _UNSAFE.sub(_escape, text)
    return re.sub(r"[\t\n]", _escape, shown) if one_line else shown


def _escape(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode("ascii")
