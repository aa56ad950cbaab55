"""Memory over a run and within a step, as CSV files and as a picture."""

import csv
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from lit_callbacks.memory.storage_ledger import PURPOSES, StorageLedger
from lit_callbacks.output.quantities import MIB

Row = Mapping[str, Any]
"""Row of a CSV file: values by column, e.g. ``step`` or ``event`` and sizes in MiB."""
_MOST_POINTS = 1000
_STEP = ("forward", "backward", "optimizer")
_COLORS = {
    "parameters": "#4c78a8",
    "gradients": "#f58518",
    "optimizer_state": "#54a24b",
    "activations": "#e45756",
    "other": "#9d9da1",
}


def step_rows(ledger: StorageLedger) -> list[Row]:
    """Memory of a step, thinned to about a thousand events, each with the largest total of its neighbors.

    Returns:
        Rows of ``event``, ``phase`` and MiB by purpose.
    """
    moments = list(ledger.timeline())
    stride = max(1, len(moments) // _MOST_POINTS)
    rows: list[Row] = []
    for start in range(0, len(moments), stride):
        among = range(start, min(start + stride, len(moments)))
        event = max(among, key=lambda i: sum(moments[i][1].values()))
        phase, purposes = moments[event]
        rows.append({"event": event, "phase": phase, **{f"{p}_mib": round(purposes[p] / MIB, 4) for p in PURPOSES}})
    return rows


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Write rows as CSV; rows may have different columns."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)


def write_picture(path: Path, run: Sequence[Row], step: Sequence[Row], title: str) -> None:
    """Draw the memory over the run (above) and within a step (below); an empty one stays blank.

    Args:
        path: path of the PNG file.
        run: rows of ``step`` and MiB by reading.
        step: rows that ``step_rows`` returns.
        title: title of the lower plot.

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
    over_run.set(xlabel="optimizer step", ylabel="MiB", title="over the run", ylim=(0, None))
    if run:
        over_run.legend(loc="lower right", fontsize="small")
    if step:
        events = [row["event"] for row in step]
        parts = [[row[f"{purpose}_mib"] for row in step] for purpose in PURPOSES]
        labels = [purpose.replace("_", " ") for purpose in PURPOSES]
        in_step.stackplot(events, parts, labels=labels, colors=[_COLORS[p] for p in PURPOSES], step="post")
        # Labels of very short phases would overlap, e.g. of zero_grad between forward and backward.
        starts = [0, *(n for n, (one, two) in enumerate(pairwise(step), 1) if one["phase"] != two["phase"]), len(step)]
        for start, end in pairwise(starts):
            if (phase := step[start]["phase"]) in _STEP and end - start > len(step) / 20:
                in_step.axvline(step[start]["event"], color="black", linewidth=0.6, linestyle=":")
                coordinates = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
                corner = (step[start]["event"], 1)
                in_step.annotate(phase, corner, xytext=(3, -2), va="top", fontsize=8, **coordinates)
        in_step.legend(loc="upper right", fontsize="small")
    in_step.set(xlabel="allocation or release", ylabel="MiB", title=title)
    figure.savefig(path, dpi=100)
