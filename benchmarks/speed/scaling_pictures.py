"""Pictures, legible in black and white, and tables of the curves of ``benchmarks.speed.scaling``."""

from pathlib import Path
from typing import Any, NamedTuple

from matplotlib import rc_context
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

Point = dict[str, Any]
STYLES = (("#1f4e79", "-", "o"), ("#d17a00", "--", "s"), ("#3f7f3f", ":", "^"))
"""Color, line style and marker of a curve's lines, in order."""


class Axis(NamedTuple):
    """Quantity of an axis."""

    key: str
    """Key of the quantity in a point."""
    label: str
    """Label of the axis, with the unit."""


RATE, MEMORY = Axis("tokens_per_second", "tokens/s"), Axis("gib", "memory, GiB")
PANELS = {
    "sequence": ("tokens in a row", (RATE, MEMORY)),
    "size": ("parameters", (RATE, MEMORY)),
    "vocabulary": ("tokens in the vocabulary", (RATE, MEMORY)),
    "ranks": ("ranks", (RATE, MEMORY)),
    "rows": ("rows of the data set", (Axis("processor_seconds", "processor seconds to the first step"), MEMORY)),
}
"""For each curve, the label of its x axis and the y axes of its panels."""
TICKS = {
    "sequence": {256: "256", 1024: "1k", 4096: "4k", 16_384: "16k"},
    "ranks": {1: "1", 2: "2", 4: "4"},
}
"""Tick labels of curves whose x doubles from point to point."""


def draw(curve: str, points: list[Point], path: Path) -> str:
    """Write the picture of a curve; returns its table in Markdown.

    Args:
        curve: name of the curve.
        points: points with ``line``, ``x`` and the measurements.
        path: path of the SVG file.
    """
    x_label, axes = PANELS[curve]
    figure = Figure(figsize=(7.2, 2.9), layout="constrained")
    FigureCanvasSVG(figure)
    for panel, axis in zip(figure.subplots(1, len(axes)), axes, strict=True):
        for line, (color, dashes, mark) in zip(dict.fromkeys(p["line"] for p in points), STYLES, strict=False):
            shown = sorted((_x(curve, p), p[axis.key]) for p in points if p["line"] == line and axis.key in p)
            if shown:
                panel.plot(*zip(*shown, strict=True), dashes, color=color, marker=mark, markersize=4, label=line)
        if curve == "ranks" and axis is RATE:
            for one in [p[axis.key] for p in points if p["x"] == 1][:1]:
                panel.plot([1, 2, 4], [one, 2 * one, 4 * one], color="grey", linewidth=0.8, label="ideal")
        panel.set_xscale("log", base=2 if curve in TICKS else 10)
        if (ticks := TICKS.get(curve)) is not None:
            panel.set_xticks(list(ticks), list(ticks.values()))
        if curve in ("size", "rows"):
            panel.set_yscale("log")
        else:
            panel.set_ylim(bottom=0)
        panel.set(xlabel=x_label, ylabel=axis.label)
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(frameon=False, fontsize=8)
    # No date and fixed ids of elements, so that the same points give the same file.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": curve}):
        figure.savefig(path, metadata={"Date": None})
    return table(curve, points)


def _x(curve: str, point: Point) -> float:
    return float(point["parameters"] if curve == "size" else point["x"])


def table(curve: str, points: list[Point]) -> str:
    """Markdown table of the measurements, one row for each ``x``."""
    x_label, axes = PANELS[curve]
    lines = list(dict.fromkeys(point["line"] for point in points))
    columns = [(line, a) for line in lines for a in axes if any(p["line"] == line and a.key in p for p in points)]
    heads = " | ".join([x_label, *(f"{axis.label}, {line}" for line, axis in columns)])
    made = [f"| {heads} |", "|---" * (len(columns) + 1) + "|"]
    of = {(p["x"], p["line"]): p for p in points}
    for x in dict.fromkeys(p["x"] for p in sorted(points, key=lambda p: _x(curve, p))):
        cells = [of.get((x, line), {}).get(axis.key) for line, axis in columns]
        made.append(f"| {x if isinstance(x, str) else f'{x:,}'} | {' | '.join(map(_text, cells))} |")
    return "\n".join(made)


def _text(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.2g}" if value < 0.1 else f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f}"
