"""Curves as SVG in the text color of the page, so that they are legible in light and dark mode."""

import io
import math
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING

from markupsafe import escape

from lit_callbacks.output.printable import printable
from lit_callbacks.report.report_data import Points

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LOSS = ("loss", "nats")
CHARTS = (
    (*LOSS, r"(.*[/_])?loss(_step|_epoch)?"),
    ("cross-entropy", "nats", r"(.*/)?cross_entropy"),
    ("training loss by source", "nats", r"train/loss/.+"),
    ("validation loss by source", "nats", r"val/loss/.+"),
    ("exact match", "share", r".*exact_match"),
    ("ROUGE and BLEU", "share", r"(.*/)?(rouge[12L]|bleu)"),
    ("accuracy", "share", r".*accuracy"),
    ("reward margin", "", r"(.*/)?reward_margin"),
    ("rewards", "", r"(.*/)?reward_(chosen|rejected)"),
    ("reward", "", r"(train|val)/reward"),
    ("parts of the reward", "", r"(.*/)?rewards/.+"),
    ("divergence from the teacher", "nats", r"(train|val)/divergence"),
    ("reward by source", "", r"(train|val)/reward/.+"),
    ("answers with a signal, and cut ones", "share", r"(.*/)?(signal|cut)_share"),
    ("divergence from the reference", "nats", r"(.*/)?kl"),
    ("length of answers", "tokens", r"(.*/)?answer_tokens"),
    ("log-probability of answers", "nats", r"(.*/)?log_prob_(chosen|rejected)"),
    ("learning rate", "", r"(.*/)?(learning_rate|lr([-_].*)?)"),
    ("gradient norm", "", r".*grad(ient)?_norm.*"),
    ("tokens per second", "tokens/s", r"throughput/tokens_per_second"),
    ("samples per second", "samples/s", r"throughput/samples_per_second"),
    ("MFU", "share", r"throughput/mfu"),
    ("seconds of a step", "s", r"throughput/.*_seconds"),
    ("memory", "MiB", r"memory/[^/]+"),
)
"""Title and unit of each chart, and a regular expression that the full name of its metrics matches. A metric belongs
to the first chart that matches."""
MOST_CURVES = 2
"""Maximum number of curves that share a chart; of more, each gets its own with its name, and an axis that fits it."""
MOST_POINTS = 300
"""Maximum number of points of a curve; of more, neighbors are averaged."""
LONGEST_LABEL = 40
"""Maximum characters of a curve's name in a legend; the table below the charts has the full name."""
_COLORS = ("#3d85d9", "#e0792f", "#3f9f63", "#a860c6", "#b8941f", "#d2555a", "#6f849c", "#2ba3a3")


def chart_of(name: str) -> tuple[str, str] | None:
    """Title and unit of the chart that a metric belongs to; None if it is in none."""
    if name.startswith("forgetting/"):
        return None
    matching = (chart for *chart, pattern in CHARTS if re.fullmatch(pattern, name, re.DOTALL))
    return next(((title, unit) for title, unit in matching), None)


def sort_into_charts(curves: Mapping[str, Points]) -> dict[tuple[str, str], dict[str, Points]]:
    """Curves by name of each chart, by title and unit of the chart. Curves of one point are left out."""
    charts: dict[tuple[str, str], dict[str, Points]] = {}
    for name, points in curves.items():
        if len(points) > 1 and (chart := chart_of(name)) is not None:
            charts.setdefault(chart, {})[name] = points
    order = [title for title, _, _ in CHARTS]
    shown: dict[tuple[str, str], dict[str, Points]] = {}
    for (title, unit), of_chart in sorted(charts.items(), key=lambda chart: order.index(chart[0][0])):
        if len(of_chart) <= MOST_CURVES:
            shown[title, unit] = of_chart
        else:
            shown |= {(name, unit): {name: points} for name, points in of_chart.items()}
    return shown


def thinned(points: Points) -> Points:
    """At most ``MOST_POINTS`` points, each the mean of some neighbors; a mean with a non-finite value is not finite."""
    size = math.ceil(len(points) / MOST_POINTS)
    parts = [points[i : i + size] for i in range(0, len(points), size)]
    return [(sum(s for s, _ in part) / len(part), sum(v for _, v in part) / len(part)) for part in parts]


def draw(title: str, unit: str, curves: Mapping[str, Points]) -> str:
    """Draw curves over optimizer steps as an ``<svg>`` element.

    Args:
        title: label of the picture for screen readers.
        unit: unit of the values.
        curves: points by curve name.

    Raises:
        ModuleNotFoundError: matplotlib is missing.
    """
    import matplotlib

    # Text stays text, in the page's font; names of data sets may hold dollars.
    with matplotlib.rc_context(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": title,
            "font.size": 9,
            "path.simplify": True,
            "text.parse_math": False,
        }
    ):
        axes = _empty_axes()
        prefixes = {name.rpartition("/")[0] for name in curves}
        shared = prefixes.pop() if len(prefixes) == 1 else ""
        labels = [_label(name.removeprefix(f"{shared}/")) for name in curves]
        for i, points in enumerate(curves.values()):
            marker = "." if len(points) < 30 else None
            color = _COLORS[i % len(_COLORS)]
            axes.plot(*zip(*thinned(points), strict=True), color=color, linewidth=1.3, marker=marker)
        axes.set(xlabel="optimizer step", ylabel=unit)
        # The limits are those of these curves, not of the chart before.
        axes.relim()
        axes.autoscale_view()
        if len(curves) > 1:
            axes.figure.legend(axes.lines, labels, loc="outside upper left", ncols=2, fontsize=8, frameon=False)
        file = io.StringIO()
        figure = axes.get_figure(root=True)
        assert figure is not None
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :].replace("#000000", "currentColor")
    # Without sizes of its own, the picture takes the width of the page.
    svg = re.sub(r' (width|height)="[\d.]+pt"', "", svg, count=2)
    return svg.replace("<svg", f'<svg role="img" aria-label="{escape(title)}"', 1)


def _empty_axes() -> "Axes":
    """Axes without curves. All charts share them: their parts take longer to create than to draw."""
    axes = _axes()
    for artist in [*axes.lines, *axes.figure.legends]:
        artist.remove()
    return axes


@lru_cache(maxsize=1)
def _axes() -> "Axes":
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    # A small figure has large letters once it is scaled to a phone.
    figure = Figure(figsize=(4.4, 2.7))
    FigureCanvasSVG(figure)
    # Room for the unit and a tick label of eight characters; a layout engine would draw everything twice to measure it.
    axes = figure.subplots(gridspec_kw={"left": 0.22, "right": 0.97, "bottom": 0.18, "top": 0.92})
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    # Places of their own: otherwise the tick labels would be measured once more to put these labels beside them.
    axes.xaxis.set_label_coords(0.5, -0.14)
    axes.yaxis.set_label_coords(0.01, 0.55, transform=figure.transFigure)
    axes.yaxis.label.set_verticalalignment("top")
    return axes


def _label(name: str) -> str:
    """A curve's name for a legend: one line, shortened; matplotlib hides names with a leading underscore."""
    name = printable(name, one_line=True)
    name = name if len(name) <= LONGEST_LABEL else f"{name[: LONGEST_LABEL - 3]}..."
    return f" {name}" if name.startswith("_") else name
