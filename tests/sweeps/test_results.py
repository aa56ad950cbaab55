"""The picture of a sweep: labels that can be read, and the best trial in its color."""

from itertools import pairwise
from pathlib import Path

import pytest

from lit_ft.run.folder import RunFolder
from lit_ft.sweeps.results import Goal, _row, _scatter
from lit_ft.sweeps.trial import Trial


def test_the_best_step_has_the_number_of_its_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("epoch,step,val/loss\n0,9,2.0\n0,19,1.0\n1,29,3.0\n")
    (tmp_path / "finished.json").write_text('{"global_step": 30}')
    trial = Trial(RunFolder(tmp_path), {})
    row = _row(trial, Goal("val/loss", "min"))
    assert (row["val/loss"], row["min"], row["at step"]) == (3.0, 1.0, 20)
    assert trial.metrics() == ["val/loss"]


def test_a_value_that_is_not_a_number_is_never_the_best(tmp_path: Path) -> None:
    trials = []
    for name, last in (("trial-001", "nan"), ("trial-002", "2.0")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.csv").write_text(f"epoch,step,val/loss\n0,9,3.0\n0,19,{last}\n")
        (tmp_path / name / "finished.json").write_text('{"global_step": 20}')
        trials.append(Trial(RunFolder(tmp_path / name), {}))
    for mode in ("min", "max"):
        goal = Goal("val/loss", mode)  # type: ignore[arg-type]
        assert [trial.name for trial in goal.ranked(trials)] == ["trial-002"]
        row = _row(trials[0], goal)
        assert (str(row["val/loss"]), row[mode], row["at step"]) == ("nan", 3.0, 10)


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
