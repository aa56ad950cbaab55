"""Memory over a run and within a step: as CSV, and as a picture."""

import csv
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from lit_callbacks.memory_readings import MIB
from lit_callbacks.storage_ledger import PURPOSES, StorageLedger

_MOST_POINTS = 1000
_COLOURS = {
    "parameters": "#4c78a8",
    "gradients": "#f58518",
    "optimizer_state": "#54a24b",
    "activations": "#e45756",
    "other": "#9d9da1",
}


def step_rows(ledger: StorageLedger) -> list[dict[str, Any]]:
    """A step's memory, at most a thousand of its moments, each the fullest of its neighbours.

    Returns:
        Rows of ``event``, ``phase`` and MiB by purpose.
    """
    moments = list(ledger.timeline())
    stride = max(1, len(moments) // _MOST_POINTS)
    rows = []
    for start in range(0, len(moments), stride):
        among = range(start, min(start + stride, len(moments)))
        event = max(among, key=lambda i: sum(moments[i][1].values()))
        phase, purposes = moments[event]
        rows.append({"event": event, "phase": phase, **{f"{p}_mib": round(purposes[p] / MIB, 4) for p in PURPOSES}})
    return rows


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows that may have different columns."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)


def write_picture(path: Path, run: Sequence[Mapping[str, Any]], step: Sequence[Mapping[str, Any]], title: str) -> None:
    """Draw the run above and the step below; each is left out where it is empty.

    Args:
        path: of the PNG.
        run: rows of ``step`` and MiB by what was read.
        step: of ``step_rows``.
        title: what the lower part shows.

    Raises:
        ModuleNotFoundError: matplotlib is missing.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), layout="constrained")
    FigureCanvasAgg(figure)
    over_run, in_step = figure.subplots(2, 1)
    for name in [name for name in (run[-1] if run else {}) if name.endswith("_mib") and "/" not in name]:
        points = [(row["step"], row[name]) for row in run if name in row]
        over_run.plot(*zip(*points, strict=True), label=name.removesuffix("_mib").replace("_", " "))
    over_run.set(xlabel="optimiser step", ylabel="MiB", title="over the run")
    if run:
        over_run.legend(loc="lower right", fontsize="small")
    if step:
        events = [row["event"] for row in step]
        parts = [[row[f"{purpose}_mib"] for row in step] for purpose in PURPOSES]
        labels = [purpose.replace("_", " ") for purpose in PURPOSES]
        in_step.stackplot(events, parts, labels=labels, colors=[_COLOURS[p] for p in PURPOSES], step="post")
        for before, row in pairwise(step):
            if row["phase"] != before["phase"] and row["phase"] in ("forward", "backward", "optimizer"):
                in_step.axvline(row["event"], color="black", linewidth=0.6, linestyle=":")
                in_step.annotate(
                    row["phase"], (row["event"], 1), xycoords=("data", "axes fraction"), fontsize=7, va="top"
                )
        in_step.legend(loc="lower right", fontsize="small")
    in_step.set(xlabel="allocation or release", ylabel="MiB", title=title)
    figure.savefig(path, dpi=100)
