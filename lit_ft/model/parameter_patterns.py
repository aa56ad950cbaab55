"""Selection of weights by regular expressions on their names."""

import re
from collections.abc import Iterable, Sequence

from lit_ft.errors import RecipeError


def matching(patterns: Iterable[str], names: Sequence[str], option: str) -> dict[str, str]:
    """Map each matching name to the first pattern that matches it.

    Raises:
        RecipeError: a pattern is not a regular expression, or matches no name.
    """
    pattern_of: dict[str, str] = {}
    for pattern in patterns:
        try:
            hits = [name for name in names if re.search(pattern, name)]
        except re.error as error:
            raise RecipeError(f"{option}: {pattern!r} is no regular expression ({error}); correct it") from error
        if not hits:
            shown = ", ".join(names[:3])
            raise RecipeError(f"{option}: {pattern!r} is found in no weight's name; names are like {shown}, ...")
        pattern_of = {**dict.fromkeys(hits, pattern), **pattern_of}
    return pattern_of


def layers_by_wildcard(name: str) -> str:
    """A module's name as Hugging Face's plans write it: ``model.layers.3.mlp`` is ``model.layers.*.mlp``.

    As transformers does it, in a private module (``parallel_utils.replace_layer_number_by_wildcard``).
    """
    return re.sub(r"\.\d+(\.|$)", r".*\1", name)
