"""jsonargparse without two things that it repeats: to go through all options for each key, and to take keys apart.

They are a quarter of the time of parsing a recipe, which is a tenth of that of all tests.
"""

import sys
from argparse import Action
from collections.abc import Hashable
from typing import Any
from weakref import WeakKeyDictionary

from jsonargparse import Namespace
from jsonargparse._namespace import add_clash_mark
from jsonargparse._subcommands import find_action_and_subcommand as search

_take_apart = Namespace._parse_key
_found: WeakKeyDictionary[Any, dict[Hashable, tuple[Action, str | None]]] = WeakKeyDictionary()


def _find(parser: Any, key: str, exclude: Any = None) -> tuple[Action | None, str | None]:
    found = _found.setdefault(parser, {})
    if (known := found.get((key, exclude))) is not None and known[0] in parser._actions:
        return known
    action, subcommand = search(parser, key, exclude)
    if action is not None and subcommand is None:  # a subcommand's parser has options of its own
        found[key, exclude] = action, None
    return action, subcommand


def _parts(namespace: Namespace, key: str) -> tuple[str, Namespace | None, str]:
    if type(key) is str and key and "." not in key and " " not in key:
        return add_clash_mark(key), namespace, ""
    return _take_apart(namespace, key)


for _name, _module in list(sys.modules.items()):
    if _name.startswith("jsonargparse") and getattr(_module, "find_action_and_subcommand", None) is search:
        _module.find_action_and_subcommand = _find  # type: ignore[attr-defined]
Namespace._parse_key = _parts  # type: ignore[method-assign]
