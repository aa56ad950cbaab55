"""Private and undeclared attributes of jsonargparse's parsers, as read in jsonargparse 4.53."""

from __future__ import annotations

import re
from argparse import Action
from collections.abc import Iterator, Mapping, Sequence
from logging import LogRecord
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from jsonargparse import ActionYesNo, ArgumentParser, Namespace
from jsonargparse._common import parser_context
from jsonargparse._typehints import ActionTypeHint

_UNIONS = (Union, UnionType)


class ListReplacingParser(ArgumentParser):
    """Parser for which a list takes the place of an earlier one as a whole.

    With jsonargparse's own, items of a list get options of the items at the same places in an earlier list of the same
    length, or of an earlier value that is no list, even those of other classes.
    """

    def _check_value_key(
        self, action: Action, value: Any, key: str, cfg: Namespace | None, append: bool = False
    ) -> Any:
        if isinstance(value, list) and not append and cfg is not None and cfg.get(action.dest) is not None:
            cfg = cfg.clone()
            cfg.pop(action.dest)
        return super()._check_value_key(action, value, key, cfg, append)


class ClassChange(NamedTuple):
    """A class of a recipe that takes the place of another."""

    before: str
    after: str
    dropped: str
    """Options of the earlier class that the other does not have, as text of a dictionary."""


def class_change(record: LogRecord) -> ClassChange | None:
    """What a record of the parser's logger tells of a changed class; None for others.

    jsonargparse tells it nowhere else, at the level of debugging, each time that it parses a recipe.
    """
    told = re.match(r"Due to class_path change from '(.+)' to '(.+)', discarding init_args: (.*)\.$", record.msg)
    return None if told is None else ClassChange(*told.groups())


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


def leave_first_out_of_help(parser: ArgumentParser, option: str) -> None:
    """Do not show the first argument of the classes that an option takes, which the code that builds them gives.

    Where the option may be null, too, jsonargparse shows them as required.
    """
    (shown,) = (action for action in parser._actions if action.dest == f"{option}.help")
    shown.sub_add_kwargs = {"fail_untyped": False, "skip": {1}}


class OptionSchema(NamedTuple):
    """An option of a parser."""

    name: str
    help: str
    default: object
    choices: tuple[str, ...]
    """Values of an option that takes a few; empty where it takes others too."""
    is_text: bool
    """Whether it takes texts only."""


def option_schemas(parser: ArgumentParser) -> Iterator[OptionSchema]:
    """Options of a parser that take a value, without sections and options that print something."""
    for action in parser._actions:
        if isinstance(action, ActionTypeHint | ActionYesNo):
            kind = getattr(action, "_typehint", bool)
            kinds = _kinds(kind)
            is_text = all(one is str for one in kinds)
            yield OptionSchema(action.dest, action.help or "", action.default, _choices(kinds), is_text)


def accepted(parser: ArgumentParser, key: str, arguments: Mapping[str, object]) -> dict[str, object]:
    """Those of a class's arguments that a parser of another class accepts, by the rule of a later ``--config``.

    Args:
        parser: parser of the other class's arguments, below ``key``.
        key: option that takes the class.
        arguments: arguments by name.
    """
    kept: dict[str, object] = {}
    for name, value in arguments.items():
        action = next((one for one in parser._actions if one.dest == f"{key}.{name}"), None)
        if action is None:
            continue
        with parser_context(lenient_check=False, load_value_mode=parser.parser_mode):
            try:
                parser._check_value_key(action, value, f"{key}.{name}", Namespace())
            except Exception:  # what jsonargparse itself catches there, too
                continue
        kept[name] = value
    return kept


def _kinds(kind: object) -> list[object]:
    """Types of a union without None; else the type itself."""
    return [one for one in (get_args(kind) if get_origin(kind) in _UNIONS else (kind,)) if one is not NoneType]


def _choices(kinds: Sequence[object]) -> tuple[str, ...]:
    values: list[str] = []
    for one in kinds:
        if one is bool:
            values += ["true", "false"]
        elif get_origin(one) is Literal:
            values += [str(value) for value in get_args(one)]
        else:
            return ()
    return tuple(dict.fromkeys(values))
