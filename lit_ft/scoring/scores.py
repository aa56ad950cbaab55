"""Figures of a model, and their comparison with those of its base."""

from collections.abc import Sequence
from dataclasses import dataclass

COLUMNS = ("task", "metric", "base", "fine-tuned", "change", "base: standard error", "fine-tuned: standard error")
"""Headers of a comparison."""

Cell = str | float | None


@dataclass(frozen=True)
class Score:
    """One figure of a model."""

    task: str
    """Task, data set or questions."""
    metric: str
    value: float
    standard_error: float | None = None
    """None where it is not known."""


def compared(tuned: Sequence[Score], base: Sequence[Score]) -> list[list[Cell]]:
    """Rows below ``COLUMNS``: the scores of a model with those of its base, which may be missing."""
    of_base = {(score.task, score.metric): score for score in base}
    rows: list[list[Cell]] = []
    for score in tuned:
        other = of_base.get((score.task, score.metric))
        before = (None, None, None) if other is None else (other.value, score.value - other.value, other.standard_error)
        rows.append([score.task, score.metric, before[0], score.value, *before[1:], score.standard_error])
    return rows
