from pathlib import Path

import pytest
from lit_callbacks.report.report_data import LAST_BYTES, read_last_metrics, read_metrics

LINES = 5000


@pytest.mark.parametrize(("validated_at", "reads_all"), [(LINES - 1, False), (2, True), (None, False)])
def test_last_metrics_are_read_from_the_end(tmp_path: Path, validated_at: int | None, reads_all: bool) -> None:
    path = tmp_path / "metrics.csv"
    header = "epoch,step,train/loss" + ",val/loss" * (validated_at is not None)
    cells = "," * (validated_at is not None)
    rows = [f"0,{step},{step / 8}{',2.5' if step == validated_at else cells}" for step in range(LINES)]
    path.write_text("\n".join([header, *rows]) + "\n")
    last, full = read_last_metrics(path, ("train/loss", "val/loss")), read_metrics(path)
    assert {name: points[-1] for name, points in last.items()} == {name: points[-1] for name, points in full.items()}
    assert (len(last["train/loss"]) == LINES) is reads_all
    assert reads_all or len(last["train/loss"]) * len(rows[0]) < LAST_BYTES


@pytest.mark.parametrize("text", ["", "epoch,step,train/loss", "epoch,step,train/loss\r\n0,0,1.5\r\n"])
def test_last_metrics_of_a_short_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text(text, newline="")
    assert read_last_metrics(path, ("train/loss", "val/loss")) == read_metrics(path)
