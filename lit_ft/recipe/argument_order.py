"""The command line as argparse can take it: files first, negative numbers, lists, and help on classes."""

import re
from collections.abc import Sequence
from itertools import pairwise

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
