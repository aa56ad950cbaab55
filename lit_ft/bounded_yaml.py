"""Loading of untrusted YAML within size limits: a few lines with anchors can expand to billions of values."""

from collections.abc import Callable
from typing import Any, TypeVar

import yaml

from lit_ft.errors import RecipeError

_Value = TypeVar("_Value")

MOST_VALUES = 100_000
"""Maximum number of values of a document, with all references expanded."""
DEEPEST = 100
"""Maximum nesting of lists and mappings; libyaml's composer is recursive and crashes the process far beyond it."""
_TOO_DEEP = f"the YAML is nested over {DEEPEST} deep, which no option is; write it flatter"
LONG_TEXT = 1_000
"""Length in characters above which a string is checked as YAML too: jsonargparse parses strings again."""

SAFE_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""Loader of plain values: libyaml's where PyYAML has it."""


def load_yaml(text: str) -> Any:
    """Load a YAML document as plain values.

    Raises:
        RecipeError: it is too large or nested too deeply.
        yaml.YAMLError: it is not valid YAML.
    """
    check_size(text)
    return yaml.load(text, Loader=SAFE_LOADER)


def bounded(load: Callable[[str], _Value]) -> Callable[[str], _Value]:
    """Wrap a YAML loader so that it checks the size first."""

    def load_bounded(text: str) -> _Value:
        check_size(text)
        return load(text)

    return load_bounded


def check_size(text: str, strings_within: int = 3) -> None:
    """Refuse YAML that expands to too many values, or that refers to itself, without building its values.

    Args:
        text: YAML document.
        strings_within: levels of long strings within strings that are checked too.

    Raises:
        RecipeError: a limit is exceeded; the message names it.
    """
    sizes: dict[str, int] = {}  # by anchor
    open_values: list[tuple[str | None, int]] = [(None, 0)]  # anchor and size, outermost first
    try:
        for event in yaml.parse(text, Loader=SAFE_LOADER):
            if isinstance(event, yaml.CollectionStartEvent):
                open_values.append((event.anchor, 1))
                if len(open_values) > DEEPEST:
                    raise RecipeError(_TOO_DEEP)
            elif (ended := _ended(event, open_values, sizes, strings_within)) is not None:
                anchor, size = ended
                if anchor is not None:
                    sizes[anchor] = size
                outer, so_far = open_values.pop()
                open_values.append((outer, so_far + size))
                if so_far + size > MOST_VALUES:
                    raise RecipeError(
                        f"the YAML stands for over {MOST_VALUES:,} values once its references are written out, or "
                        "refers to itself; write it without anchors (&) and references (*)"
                    )
    except yaml.YAMLError as error:
        if "nesting depth" in str(error):  # libyaml's own limit, 1,000, from PyYAML 6.0.4 on
            raise RecipeError(_TOO_DEEP) from None
        return  # loading it reports the syntax error; the part before it is within the limits


def _ended(
    event: yaml.Event, open_values: list[tuple[str | None, int]], sizes: dict[str, int], strings_within: int
) -> tuple[str | None, int] | None:
    """Anchor and size, in values, of the value that an event completes; None where it completes none."""
    if isinstance(event, yaml.CollectionEndEvent):
        return open_values.pop()
    if isinstance(event, yaml.AliasEvent):
        is_enclosing = any(anchor == event.anchor for anchor, _ in open_values)
        # An anchor that there is not is an error of the YAML, which loading reports.
        return None, MOST_VALUES + 1 if is_enclosing else sizes.get(event.anchor or "", 1)
    if isinstance(event, yaml.ScalarEvent):
        if len(event.value) > LONG_TEXT and strings_within:
            check_size(event.value, strings_within - 1)
        return event.anchor, 1
    return None
