import argparse
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import preference_tuning
from benchmarks.peers import lit_ft_preference


@pytest.mark.parametrize(("objective", "loss"), [("dpo", 0.6931), ("kto", 0.5), ("reward", None)])
def test_a_run_and_its_row_of_the_table(tmp_path: Path, objective: str, loss: float | None) -> None:
    """lit_ft's side; TRL's needs its environment."""
    options = argparse.Namespace(
        data="recipes/data/quickstart_train.json",
        shape="tiny",
        device="cpu",
        pairs=6,
        micro_batch_size=2,
        max_length=64,
        objective=objective,
    )
    job = preference_tuning.prepare(tmp_path, options)
    given = {"adapter": str(tmp_path / "adapter"), "epochs": 2, "objective": objective}
    measured = lit_ft_preference.run(replace(job, folder=str(tmp_path), options=given))
    assert len(measured.losses) == 6
    assert loss is None or measured.losses[0] == pytest.approx(loss, abs=1e-4)
    assert len(measured.ends) == 7  # the beginning, and the ends of the steps
    found = {"ends": measured.ends, "peak_memory_bytes": 2**30, "losses": measured.losses}
    row = preference_tuning.row_of("lit_ft", [found, found], measured.losses, pairs=12)
    assert row.startswith("| lit_ft | ")
    assert row.endswith("| 1,024 MiB | 0e+00 |")
    assert "ended" in preference_tuning.row_of("TRL", [found, {"error": "ended"}], measured.losses, pairs=12)
