"""The command that a recipe stands for: a file, and the options in which the recipe differs from it."""

import json
from collections.abc import Iterator, Mapping, Sequence

import yaml

from lit_ft.board.recipe_text import RecipeText
from lit_ft.bounded_yaml import load_yaml


def fit_arguments(recipe: RecipeText, base: RecipeText | None = None, files: Sequence[str] = ()) -> list[str] | None:
    """Arguments of ``fit`` that stand for a recipe.

    Args:
        recipe: the recipe.
        base: recipe of the files that it began with; None for one written from nothing.
        files: paths of those files, in order.

    Returns:
        ``--config FILE`` of each and options that differ; all options, where the recipe leaves out what the files have:
        an option cannot take that back. None where a text would be read as something else on a command line.
    """
    given: list[tuple[str, object]]
    start: list[str] = []
    if base is not None and files and set(base.options()) <= set(recipe.options()):
        start = [part for file in files for part in ("--config", file)]
        given = list(differences(recipe, base))
    else:
        given = list(_all(recipe.content()))
    if not all(_is_option(value) for _, value in given):
        return None
    return start + [part for name, value in given for part in (f"--{name}", _text(value))]


def differences(recipe: RecipeText, base: RecipeText) -> Iterator[tuple[str, object]]:
    """Options in which a recipe differs from another one, but not those that it lacks."""
    before, classes = base.options(), recipe.classes()
    replaced: tuple[str, ...] = ()
    for name, value in recipe.options().items():
        if (name in before and _same(before[name], value)) or name.startswith(replaced):
            continue
        if name in classes and name not in ("model", "data"):
            # With all its arguments: those of another class do not fit.
            replaced += (f"{name}.",)
            value = recipe.get(name)
        yield name, value


def _all(content: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    for key, value in content.items():
        is_section = key in ("model", "data", "trainer") and isinstance(value, Mapping)
        if is_section and isinstance(value, Mapping) and not {"class_path", "init_args"} & set(value):
            yield from ((f"{key}.{name}", inner) for name, inner in value.items())
        else:
            yield key, value


def _same(one: object, other: object) -> bool:
    """Equality that tells ``true`` from 1; 1e-4, a text for YAML, is the number."""
    return json.dumps(_read(one), sort_keys=True) == json.dumps(_read(other), sort_keys=True)


def _read(value: object) -> object:
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _is_option(value: object) -> bool:
    """Whether a value on a command line is read as itself: the parser reads it as YAML, then as an option's type."""
    if not isinstance(value, str):
        return True
    if value.startswith("-"):
        return False
    try:
        return isinstance(load_yaml(value), str | int | float)
    except (yaml.YAMLError, ValueError):
        return True  # then it is a text
