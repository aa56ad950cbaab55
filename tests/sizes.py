"""Sizes of the cases."""

import os
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import TypeVar

T = TypeVar("T")
U = TypeVar("U")

FULL_SIZE = bool(os.environ.get("LIT_FT_FULL_SIZE"))
"""Whether each case runs at the size that docs/numerics.md was measured with: all layers, epochs and repetitions, and
costly ones in every way."""


def pairs_in_turn(
    cases: Iterable[T], ways: Sequence[U], is_costly: Callable[[T], bool] = lambda _: True
) -> list[tuple[T, U]]:
    """Each case in each way; costly cases in one way each, by turns, unless ``FULL_SIZE``."""
    pairs, costly = list[tuple[T, U]](), 0
    for case in cases:
        if FULL_SIZE or not is_costly(case):
            pairs += product([case], ways)
        else:
            pairs.append((case, ways[costly % len(ways)]))
            costly += 1
    return pairs
