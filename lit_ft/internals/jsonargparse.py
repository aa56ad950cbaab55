"""Private and undeclared attributes of jsonargparse's parsers, as read in jsonargparse 4.53."""

from __future__ import annotations

from argparse import Action
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser


def option_names(parser: ArgumentParser) -> list[str]:
    """Names of a parser's options, as keys of its result; argparse keeps them to itself."""
    return [action.dest for action in parser._actions]


def positional_names(parser: ArgumentParser) -> list[str]:
    """Names of a parser's arguments that stand without an option."""
    return [action.dest for action in parser._actions if not action.option_strings]


def allow_untyped(option: Action) -> None:
    """Accept classes with arguments that have no type hint, for an option that ``add_argument`` has returned.

    LightningCLI does so for models; ``add_argument`` takes no ``fail_untyped``, as ``add_subclass_arguments`` does.
    """
    option.sub_add_kwargs["fail_untyped"] = False  # type: ignore[attr-defined]
