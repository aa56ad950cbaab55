"""Recipe files and the command line that names them, checked before they are parsed."""

import os
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import yaml
from jsonargparse import Namespace

from lit_ft.bounded_yaml import SAFE_LOADER, check_size
from lit_ft.errors import RecipeError

_NEGATIVE_NUMBER = re.compile(r"-(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


def in_order(arguments: Sequence[str]) -> list[str]:
    """Command line with its files first, so that options override files wherever they stand; argparse takes the last.

    Negative numbers are joined to their option: argparse takes ``-1e-3`` for an option of its own.
    """
    command, given = list(arguments[:1]), iter(arguments[1:])
    files: list[str] = []
    options: list[str] = []
    for argument in given:
        if re.fullmatch(r"-[A-Za-z][\w.]{2,}(=.*)?", argument):  # argparse would take it for -c with a value
            raise RecipeError(f"{argument!r} begins with one dash; write -{argument}")
        if argument in ("--config", "-c"):
            files += [argument, *([value] if (value := next(given, None)) is not None else [])]
        elif argument.startswith(("--config=", "-c=")):
            files.append(argument)
        elif _NEGATIVE_NUMBER.fullmatch(argument) and options and re.fullmatch(r"--[\w.+]+", options[-1]):
            options[-1] += f"={argument}"
        else:
            options.append(argument)
    return command + files + options


def check_files(arguments: Sequence[str]) -> None:
    """Refuse files of ``--config`` that are no recipes.

    Raises:
        RecipeError: a file is not readable, not UTF-8, not YAML, not a mapping, or has a key twice; the message names
            the file and the line.
    """
    given = [b for a, b in pairwise(arguments) if a in ("--config", "-c")]
    given += [one.split("=", 1)[1] for one in arguments if one.startswith(("--config=", "-c="))]
    for path in (Path(name) for name in given if "\x00" not in name):
        try:
            if path.is_file():
                _check_yaml(path, path.read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise RecipeError(
                f"--config {path}: is not UTF-8 (byte {error.start}); save the recipe as UTF-8 text"
            ) from error
        except OSError as error:
            raise RecipeError(f"--config {path}: cannot be read ({error.strerror}); name another file") from error


def _check_yaml(path: Path, text: str) -> None:
    check_size(text)
    try:
        root = yaml.compose(text, Loader=SAFE_LOADER)
    except yaml.YAMLError as error:
        mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
        line = mark.line if mark is not None else 0
        reason = error.problem if isinstance(error, yaml.MarkedYAMLError) else str(error)
        is_tab = "\t" in text.split("\n")[min(line, text.count("\n"))]
        advice = "indent with spaces, not with a tab" if is_tab else "correct it there, or in the line before"
        raise RecipeError(f"{path}:{line + 1}: is no YAML ({reason}); {advice}") from error
    if root is None:
        raise RecipeError(f"{path}: is empty; a recipe names at least a model and data, as recipes/qwen.yaml does")
    if not isinstance(root, yaml.MappingNode):
        what = "a list" if isinstance(root, yaml.SequenceNode) else "one value"
        raise RecipeError(f"{path}: holds {what}; a recipe is a mapping, e.g. data: {{path: rows.json}}")
    for key, first, line in _repeated_keys(root, set()):
        raise RecipeError(
            f"{path}:{line}: {key!r} stands in line {first} already, and the later one would replace all of the first; "
            "put both together"
        )


def _repeated_keys(node: yaml.Node, seen: set[int]) -> Iterator[tuple[str, int, int]]:
    """Keys that a mapping has twice, each with the two lines, counted from 1."""
    if id(node) in seen:  # an anchor, or a document that refers to itself
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _repeated_keys(item, seen)
    if isinstance(node, yaml.MappingNode):
        lines: dict[str, int] = {}
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in lines and key.value != "<<":
                    yield key.value, lines[key.value], key.start_mark.line + 1
                lines[key.value] = key.start_mark.line + 1
            yield from _repeated_keys(value, seen)


def expand_home(value: object) -> object:
    """Value of a recipe with ``~`` expanded at the start of its strings, at any depth; namespaces change in place.

    A shell expands it only where a word begins: not in a recipe, and not after ``--run_dir=``.
    """
    if isinstance(value, str):
        return os.path.expanduser(value)
    if isinstance(value, Namespace):
        for name, inner in vars(value).items():
            setattr(value, name, expand_home(inner))
    elif isinstance(value, dict):
        return {name: expand_home(inner) for name, inner in value.items()}
    elif isinstance(value, list):
        return [expand_home(inner) for inner in value]
    return value
