"""Which run of cases that are alike, or that can each run in several ways: the same ones each time."""

import itertools
import os
from collections.abc import Iterable
from typing import Any

EVERY_CASE = bool(os.environ.get("LIT_FT_EVERY_CASE"))
"""Whether all of them run, on models of the sizes that docs/numerics.md was measured with."""


def in_turn(cases: Iterable[Any], ways: Iterable[Any]) -> list[Any]:
    """Each case with one of the ways in turn; with ``LIT_FT_EVERY_CASE=1`` each with all of them.

    Args:
        cases: cases, all of which run.
        ways: ways in which each can run.
    """
    ways = list(ways)
    turn = itertools.cycle(ways)
    return [(case, way) for case in cases for way in (ways if EVERY_CASE else [next(turn)])]


def some_of(cases: Iterable[Any], step: int = 2) -> list[Any]:
    """Each ``step``-th of cases that are alike, from the first on; with ``LIT_FT_EVERY_CASE=1`` all of them."""
    return list(cases)[:: 1 if EVERY_CASE else step]
