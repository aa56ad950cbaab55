"""Command line: its arguments as argparse can take them, and the parser of options beside those of a recipe.

Without slow imports.
"""

import re
from argparse import Action, ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Sequence
from difflib import get_close_matches
from itertools import pairwise
from typing import Any, NoReturn

from lit_ft.errors import RecipeError

_NO_VALUE = re.compile(r"--(?=$|[A-Za-z])\S*$")
"""What begins with two dashes is an option, unless it has a space."""
_NEGATIVE_NUMBER = re.compile(r"-(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_ITEM = re.compile(r"(--[\w.]+?)(\[\d+\]|(?<=sources)\.\d+|(?<=callbacks)\.\d+)")
_LISTS_OF_CLASSES = ("--trainer.callbacks", "--trainer.logger", "--trainer.plugins")
_HELP_WITHIN = re.compile(r"(--(?:data|model)\.)\w+\.help(=|$)")
_CLASSES_OF_HELP = {
    "--data.help": "lit_ft.TextDataModule",
    "--model.help": "lit_ft.CausalLM",
    "--optimizer.help": "torch.optim.AdamW",
}
"""Class that the help on an option is about where none is named."""


def whole_number(text: str) -> int:
    """Type of an option: a whole number of at least 0."""
    if (value := int(text)) < 0:
        raise ArgumentTypeError(f"{value} must be 0 or more")
    return value


whole_number.__name__ = "int"  # which argparse names


def positive(text: str) -> float:
    """Type of an option: a number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ArgumentTypeError(f"{text!r} must be a number above 0, e.g. 24")
    return value


class OptionParser(ArgumentParser):
    """Parser of a command's own options, with errors in one line; an abbreviated name is refused."""

    def __init__(self, **options: Any) -> None:
        """Build a parser.

        Args:
            options: those of argparse's parser.
        """
        self._names: list[str] = []
        super().__init__(**options, allow_abbrev=False)

    def add_argument(self, *names: Any, **options: Any) -> Action:
        """Add an option, as argparse does, and note its name."""
        self._names += [name for name in names if name.startswith("--")]
        return super().add_argument(*names, **options)

    def parse_known_args(  # type: ignore[override]  # argparse declares a generic namespace
        self, args: Sequence[str] | None = None, namespace: Namespace | None = None
    ) -> tuple[Namespace, list[str]]:
        """Options of the command and the arguments that are left; an abbreviation is named before what is missing."""
        for name in {argument.partition("=")[0] for argument in args or []} - {*self._names, "--"}:
            meant = [one for one in self._names if name.startswith("--") and one.startswith(name)]
            if meant:
                self.error(f"unknown option {name}; did you mean {meant[0]}?")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Raise an error instead of printing the usage.

        Raises:
            RecipeError: always.
        """
        given = message.removeprefix("unrecognized arguments: ").partition("=")[0].split(" ")[0]
        if message.startswith("unrecognized") and (near := get_close_matches(given, self._names, n=1)):
            message = f"unknown option {given}; did you mean {near[0]}?"
        raise RecipeError(message if message.endswith("?") else f"{message}; see {self.prog} --help")


def in_order(arguments: Sequence[str]) -> list[str]:
    """Command line with its files first, so that options override files wherever they stand; argparse takes the last.

    Negative numbers are joined to their option: argparse takes ``-1e-3`` for an option of its own.

    Raises:
        RecipeError: an option begins with one dash or names an item of a list, or an option of a section has no value.
    """
    command, given = list(arguments[:1]), iter(arguments[1:])
    files: list[str] = []
    options: list[str] = []
    for argument in given:
        if argument in ("--", "="):
            raise RecipeError(f"{argument!r} stands alone; write --OPTION VALUE, or --OPTION=VALUE without spaces")
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
    for option, value in pairwise([*options, "--"]):
        # argparse would name the section alone.
        if re.fullmatch(r"--\w+(\.[\w+]+)+", option) and not option.endswith(".help") and _NO_VALUE.match(value):
            raise RecipeError(f"{option} has no value behind it; add one")
    return command + files + _expanded(options)


def _expanded(options: Sequence[str]) -> list[str]:
    """Options with null before a list of classes, whose items would else get options of those in an earlier one.

    Help without a class gets the default class, and help on an option of a class is help of that class first.
    """
    expanded: list[str] = []
    for option, value in pairwise([*options, "--"]):
        name, joined, text = option.partition("=")
        if (item := _ITEM.match(name)) is not None:
            raise RecipeError(f"{name}: items of a list have no options of their own; give all: {item[1]} '[...]'")
        if name in _LISTS_OF_CLASSES and (text if joined else value).lstrip().startswith("["):
            expanded.append(f"{name}=null")
        if (within := _HELP_WITHIN.match(option)) is not None:
            expanded += [f"{within[1]}help", _CLASSES_OF_HELP[f"{within[1]}help"]]
        expanded.append(option)
        if option in _CLASSES_OF_HELP and _NO_VALUE.match(value):
            expanded.append(_CLASSES_OF_HELP[option])
    return expanded
