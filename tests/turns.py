"""Which of many like cases run: with ``LIT_FT_EVERY_CASE=1`` all of them, otherwise a part, another one each day."""

import itertools
import os
from collections.abc import Callable, Iterable
from datetime import date
from typing import Any

EVERY_CASE = bool(os.environ.get("LIT_FT_EVERY_CASE"))
"""Whether all cases run, on models of the sizes that docs/numerics.md was measured with."""
DAY = int(os.environ.setdefault("LIT_FT_DAY", str(date.today().toordinal())))
"""Number of the day; all workers of ``pytest -n`` have that of the process that starts them."""


def of_today(cases: Iterable[Any], days: int = 2) -> list[Any]:
    """Those of the cases that run today: all of them have run after ``days`` days."""
    cases = list(cases)
    return cases if EVERY_CASE else cases[DAY % days :: days]


def in_turn(cases: Iterable[Any], ways: Iterable[Any], takes_all: Callable[[Any], bool] = lambda _: False) -> list[Any]:
    """Each case with one of the ways in turn, or with all of them.

    The way changes every second day, so that a case which runs every second day gets each of them.
    """
    ways = list(ways)
    turn = itertools.islice(itertools.cycle(ways), DAY // 2 % len(ways), None)
    return [
        (case, way) for case in cases for way in (ways if EVERY_CASE or takes_all(case) else itertools.islice(turn, 1))
    ]
