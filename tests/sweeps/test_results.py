"""The picture of a sweep: labels that can be read, and the best trial in its color."""

from itertools import pairwise

import pytest

from lit_ft.sweeps.results import _scatter


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        (["3e-3", "1e-3", "10"], ["1e-3", "3e-3", "10"]),  # in the order of the numbers, as they were given
        (["plain", "chatml"], ["plain", "chatml"]),
    ],
)
def test_few_values_are_side_by_side(values: list[str], labels: list[str]) -> None:
    figure = pytest.importorskip("matplotlib.figure", reason="the extra `plots` is not installed").Figure()
    axes = figure.subplots()
    _scatter(axes, values, [float(i) for i in range(len(values))], ["red"] * len(values))
    assert [label.get_text() for label in axes.get_xticklabels()] == labels
    assert axes.collections[0].get_offsets()[:, 0].tolist() == [labels.index(value) for value in values]


@pytest.mark.parametrize(("least", "scale"), [(1e-4, "log"), (1e-3, "linear")])
def test_labels_of_many_numbers_do_not_overlap(least: float, scale: str) -> None:
    agg = pytest.importorskip("matplotlib.backends.backend_agg", reason="the extra `plots` is not installed")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5, 3.8))
    axes = figure.subplots()
    _scatter(axes, [str(least + i * 1e-3 / 2) for i in range(9)], [0.0] * 9, ["red"] * 9)
    agg.FigureCanvasAgg(figure).draw()
    labels = [*axes.get_xticklabels(), *axes.get_xticklabels(minor=True)]
    boxes = sorted((box.x0, box.x1) for label in labels if label.get_text() for box in [label.get_window_extent()])
    assert axes.get_xscale() == scale
    assert len(boxes) > 1
    assert all(end < begin for (_, end), (begin, _) in pairwise(boxes))
