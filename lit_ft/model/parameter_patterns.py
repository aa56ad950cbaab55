"""Weights chosen by regular expressions for their names."""

import re
from collections.abc import Iterable, Sequence

from lit_ft.errors import RecipeError


def matching(patterns: Iterable[str], names: Sequence[str], option: str) -> dict[str, str]:
    """For each name that a pattern is found in, the first such pattern.

    Raises:
        RecipeError: a pattern is no regular expression, or is found in no name.
    """
    found: dict[str, str] = {}
    for pattern in patterns:
        try:
            hits = [name for name in names if re.search(pattern, name)]
        except re.error as error:
            raise RecipeError(f"{option}: {pattern!r} is no regular expression ({error}); mend it") from error
        if not hits:
            shown = ", ".join(names[:3])
            raise RecipeError(f"{option}: {pattern!r} is found in no weight's name; names are like {shown}, ...")
        found = {**dict.fromkeys(hits, pattern), **found}
    return found
