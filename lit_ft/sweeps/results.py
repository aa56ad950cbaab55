"""Results of a sweep: the order of its trials, a table, ``sweep.csv`` and ``sweep.png``."""

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lit_callbacks.output.quantities import as_count, as_number
from lit_callbacks.output.tables import show_table

from lit_ft.sweeps.search_space import LOG_RATIO
from lit_ft.sweeps.trial import Trial

if TYPE_CHECKING:
    from matplotlib.axes import Axes


MOST_SIDE_BY_SIDE = 6
"""Maximum number of different values of an option that a picture has side by side; more are on a number line."""
LONGEST_LABELS = 36
"""Maximum number of characters of values that stand in one line below a picture; longer ones are turned."""
_BEST, _OTHER = "#f58518", "#4c78a8"


@dataclass(frozen=True)
class Goal:
    """Metric that trials are compared by: its value at the end of training.

    Attributes:
        metric: name, as in ``metrics.csv``.
        mode: whether lower or higher values are better.
    """

    metric: str
    mode: Literal["min", "max"]

    def value(self, trial: Trial) -> float | None:
        """Last value of a finished trial; None if it is not finished, has not logged the metric, or logged a NaN."""
        curve = trial.curve(self.metric) if trial.is_finished else []
        return curve[-1][1] if curve and not math.isnan(curve[-1][1]) else None

    def best_of(self, curve: Sequence[tuple[int, float]]) -> tuple[int, float]:
        """Step and value of the best point of a curve, NaN only if there is nothing else."""
        known = [point for point in curve if not math.isnan(point[1])]
        return (min if self.mode == "min" else max)(known or curve, key=lambda point: point[1])

    def ranked(self, trials: Sequence[Trial]) -> list[Trial]:
        """Finished trials that have a value, the best one first."""
        values = [(value, trial) for trial in trials if (value := self.value(trial)) is not None]
        ordered = sorted(values, key=lambda pair: pair[0], reverse=self.mode == "max")
        return [trial for _, trial in ordered]


def show(trials: Sequence[Trial], goal: Goal) -> None:
    """Print the table, the best trials first and those without a result last."""
    ranked = goal.ranked(trials)
    ordered = ranked + [trial for trial in trials if trial not in ranked]
    rows = [_row(trial, goal) for trial in ordered]
    columns = list(rows[0]) if rows else []
    # Numbers are shortened here: where a trial failed, the column has a text too.
    cells = [[as_number(cell) if isinstance(cell, float) else cell for cell in row.values()] for row in rows]
    shown = [column for column in columns if column not in ("failure", "run_dir")]
    show_table(
        f"{as_count(len(trials), 'trial')} by {goal.metric} ({goal.mode})", shown, [row[: len(shown)] for row in cells]
    )


def _row(trial: Trial, goal: Goal) -> dict[str, object]:
    curve = trial.curve(goal.metric)
    step, best = goal.best_of(curve) if curve else ("", "")
    return {
        "trial": trial.name,
        **trial.values,
        goal.metric: curve[-1][1] if curve and trial.is_finished else "",
        goal.mode: best,
        "at step": step,
        "seconds": round(trial.seconds),
        "state": trial.state,
        "failure": trial.failure or "",
        "run_dir": str(trial.run.root),
    }


def write_csv(trials: Sequence[Trial], goal: Goal, path: Path) -> None:
    """Write the table to a file, in the order of the trials, with failures and run folders."""
    rows = [_row(trial, goal) for trial in trials]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def draw(trials: Sequence[Trial], goal: Goal, path: Path) -> None:
    """Write a picture: the metric over steps, a curve per trial, and its last value by each varied option.

    Without matplotlib a line says so.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        rank_zero_info(
            f"{path} is not drawn: it needs the package matplotlib, which is not installed; pip install -e '.[plots]'"
        )
        return
    best = next(iter(goal.ranked(trials)), None)
    keys = list(trials[0].values)
    figure = Figure(figsize=(4.5 * (1 + len(keys)), 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    curves, *by_option = figure.subplots(1, 1 + len(keys), squeeze=False)[0]
    for trial in trials:
        if points := trial.curve(goal.metric):
            color, label = (_BEST, f"best: {trial.name}") if trial is best else (_OTHER, None)
            curves.plot(*zip(*points, strict=True), marker=".", color=color, label=label, zorder=2 + (trial is best))
    curves.set(xlabel="optimizer step", ylabel=goal.metric)
    if best is not None:
        curves.legend(frameon=False)
    curves.xaxis.get_major_locator().set_params(integer=True)
    finished = [(trial, value) for trial in trials if (value := goal.value(trial)) is not None]
    for axes, key in zip(by_option, keys, strict=True):
        colors = [_BEST if trial is best else _OTHER for trial, _ in finished]
        _scatter(axes, [trial.values[key] for trial, _ in finished], [value for _, value in finished], colors)
        axes.set(xlabel=key, ylabel=f"last {goal.metric}")
    figure.savefig(path, dpi=120)


def _scatter(axes: "Axes", values: Sequence[str], results: Sequence[float], colors: Sequence[str]) -> None:
    """Plot results by an option's values: many numbers on a number line, few numbers and texts side by side."""
    from matplotlib.ticker import LogLocator, NullFormatter

    try:
        numbers = [float(value) for value in values]
    except ValueError:
        numbers = []
    distinct = list(dict.fromkeys(sorted(values, key=float) if numbers else values))
    if numbers and len(distinct) > MOST_SIDE_BY_SIDE:
        axes.scatter(numbers, results, c=colors)
        axes.locator_params("x", nbins=5)
        if min(numbers) > 0 and max(numbers) >= LOG_RATIO * min(numbers):
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
            axes.xaxis.set_major_formatter("{x:g}")
            axes.xaxis.set_minor_formatter(NullFormatter())
        return
    axes.scatter([distinct.index(value) for value in values], results, c=colors)
    axes.set_xticks(range(len(distinct)), distinct)
    if sum(map(len, distinct)) > LONGEST_LABELS:
        for label in axes.get_xticklabels():
            label.set(rotation=20, ha="right", rotation_mode="anchor")
    axes.set_xmargin(0.2)
