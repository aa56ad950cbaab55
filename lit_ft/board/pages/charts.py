"""Live curves: ECharts, which NiceGUI brings, of a run's logged metrics."""

import math
from collections.abc import Mapping, Sequence

from lit_callbacks.report.report_data import Points
from nicegui import ui

MOST_POINTS = 400
"""Points of a curve on the page; of more, each is the mean of its neighbors."""
COLORS = ("#3d85d9", "#d98a3d")
GRAY = "#8a94a6"
"""Color of axes and text, readable by day and by night."""


class Chart:
    """Curves of some metrics over the optimizer steps, drawn again when they change."""

    def __init__(self, caption: str, metrics: Sequence[str], logarithmic: bool = False) -> None:
        """Draw an empty chart.

        Args:
            caption: text above it.
            metrics: names of the metrics; those that are not logged are left out.
            logarithmic: whether the values' axis is logarithmic where all are above 0.
        """
        self.metrics, self._logarithmic = list(metrics), logarithmic
        self._drawn: object = None
        with ui.element("div").classes("card") as self.box:
            ui.label(caption).classes("caption")
            self._chart = ui.echart(_options()).classes("chart")

    def update(self, curves: Mapping[str, Points]) -> None:
        """Draw what has been logged; the chart is hidden where there is nothing."""
        shown = {name: thinned(curves[name], MOST_POINTS) for name in self.metrics if curves.get(name)}
        self.box.set_visibility(bool(shown))
        if shown == self._drawn:
            return
        self._drawn = shown
        options = self._chart.options
        options["series"] = [_series(name, points, number) for number, (name, points) in enumerate(shown.items())]
        options["legend"] = {"show": len(shown) > 1, "top": 0, "type": "scroll", "textStyle": {"color": GRAY}}
        values = [value for points in shown.values() for _, value in points]
        is_log = self._logarithmic and bool(values) and min(values) > 0 and max(values) > 10 * min(values)
        options["yAxis"]["type"] = "log" if is_log else "value"
        self._chart.update()


def thinned(points: Points, most: int) -> list[list[float]]:
    """Finite points of a curve, at most so many, each the mean of its neighbors."""
    finite = [(x, y) for x, y in points if math.isfinite(y)]
    width = -(-len(finite) // most) or 1
    parts = [finite[start : start + width] for start in range(0, len(finite), width)]
    return [[part[-1][0], sum(y for _, y in part) / len(part)] for part in parts]


def _series(name: str, points: list[list[float]], number: int) -> dict[str, object]:
    color = COLORS[number % len(COLORS)]
    return {
        "name": name.partition("/")[2] or name if name.startswith("throughput/") else name,
        "type": "line",
        "data": points,
        "showSymbol": len(points) < 20,
        "symbol": "circle",
        "symbolSize": 5,
        "lineStyle": {"width": 2, "color": color},
        "itemStyle": {"color": color},
    }


def _options() -> dict[str, object]:
    axis = {
        "axisLabel": {"color": GRAY, "hideOverlap": True},
        "axisLine": {"lineStyle": {"color": GRAY}},
        "splitLine": {"lineStyle": {"color": GRAY, "opacity": 0.25}},
    }
    return {
        "animation": False,
        "grid": {"left": 8, "right": 16, "top": 28, "bottom": 8, "containLabel": True},
        "tooltip": {"trigger": "axis", "confine": True},
        "xAxis": {"type": "value", "min": "dataMin", "max": "dataMax", **axis, "splitLine": {"show": False}},
        "yAxis": {"type": "value", "scale": True, **axis},
        "series": [],
    }
