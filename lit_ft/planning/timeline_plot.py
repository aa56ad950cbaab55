"""Plot of a pipeline's timeline: a line for each rank, a box for each micro-batch."""

from collections.abc import Sequence
from pathlib import Path

from lit_ft.errors import RecipeError
from lit_ft.planning.pipeline_timeline import BACKWARD, FORWARD, INPUT, WEIGHT, Work

_NAMES = {FORWARD: "forward", BACKWARD: "backward", INPUT: "backward, inputs", WEIGHT: "backward, weights"}
_COLORS = {FORWARD: "#4c78a8", BACKWARD: "#f58518", INPUT: "#f58518", WEIGHT: "#54a24b"}
_NUMBERED_BOXES = 160
"""Largest number of boxes on a rank's line for which each box has room for its number."""


def draw(table: Sequence[Sequence[Work]], path: Path, title: str) -> None:
    """Write a timeline as an image; a rank's second stage is drawn paler than its first.

    Args:
        table: work of each rank, as ``timeline`` returns it.
        path: path of the image; its suffix selects the format.
        title: title of the plot.

    Raises:
        RecipeError: matplotlib is missing, or the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise RecipeError(
            "--draw needs the package matplotlib, which is not installed; pip install -e '.[plots]'"
        ) from error
    length = max(work.end for of_rank in table for work in of_rank)
    figure = Figure(figsize=(min(40, 3 + length / 4), 1.2 + 0.5 * len(table)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for rank, of_rank in enumerate(table):
        first = min(work.stage for work in of_rank)
        for work in of_rank:
            width, shade = work.end - work.start, 1.0 if work.stage == first else 0.55
            axes.barh(rank, width, left=work.start, color=_COLORS[work.kind], alpha=shade, edgecolor="white", height=1)
            if len(of_rank) <= _NUMBERED_BOXES:
                middle = (work.start + width / 2, rank)
                axes.annotate(str(work.micro_batch), middle, ha="center", va="center", fontsize=7, color="white")
    kinds = [kind for kind in _NAMES if any(work.kind == kind for of_rank in table for work in of_rank)]
    handles = [axes.barh(0, 0, color=_COLORS[kind]) for kind in kinds]
    axes.legend(handles, [_NAMES[kind] for kind in kinds], loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    axes.set(xlabel="time, in forward passes of a stage", xlim=(0, length), ylim=(len(table) - 0.5, -0.5), title=title)
    axes.set_yticks(range(len(table)), [f"rank {rank}" for rank in range(len(table))])
    try:
        if not path.suffix:
            raise ValueError("its name has no suffix")  # matplotlib would write to another name
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise RecipeError(
            f"--draw {path} cannot be written ({error}); name a .png, .svg or .pdf file in a folder that exists"
        ) from error
