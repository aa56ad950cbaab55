"""Sizes of the cases, and which way each runs in, where it has several: the same ones each time."""

import itertools
import os
from collections.abc import Iterable
from typing import Any

FULL_SIZE = bool(os.environ.get("LIT_FT_FULL_SIZE"))
"""Whether each case runs in all its ways, at the size that docs/numerics.md was measured with: all layers, epochs and
repetitions, and a C++ compiler."""


def in_turn(cases: Iterable[Any], ways: Iterable[Any]) -> list[Any]:
    """Each case with one of the ways in turn; with ``LIT_FT_FULL_SIZE=1`` each with all of them.

    Args:
        cases: cases, all of which run.
        ways: ways in which each can run.
    """
    ways = list(ways)
    turn = itertools.cycle(ways)
    return [(case, way) for case in cases for way in (ways if FULL_SIZE else [next(turn)])]
