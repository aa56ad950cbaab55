import argparse
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import distillation
from benchmarks.peers import lit_ft_distillation


@pytest.mark.parametrize("new_tokens", [0, 3])
def test_a_run_and_its_row_of_the_table(tmp_path: Path, new_tokens: int) -> None:
    """lit_ft's side; TRL's needs its environment."""
    options = argparse.Namespace(
        data="recipes/data/quickstart_train.json",
        shape="tiny",
        device="cpu",
        samples=6,
        micro_batch_size=1,
        accumulate=2,
        max_length=64,
    )
    job = distillation.prepare(tmp_path, options)
    given = {"teacher": str(tmp_path / "teacher"), "epochs": 1, "new_tokens": new_tokens}
    measured = lit_ft_distillation.run(replace(job, folder=str(tmp_path), options=given))
    assert len(measured.losses) == 3
    assert len(measured.ends) == len(measured.processor_ends) == 4  # the beginning, and the ends of the steps
    assert min(measured.losses) > 0
    found = {
        "ends": [1.0, 2.0, 3.0, 5.0],
        "processor_ends": [0.5, 1.0, 1.5, 3.5],
        "peak_memory_bytes": 2**30,
        "losses": [0.3, 0.2, 0.1],
    }
    slow = {**found, "ends": [1.0, 3.0, 5.0, 9.0]}
    row = distillation.row_of("TRL", [slow, slow], [found, found])
    assert row == "| TRL | 2.67 (+-0.00) | 2.00x | 1.00 (+-0.00) | 1.00x | 1,024 MiB | 0.3000 | 0.1000 |"
    assert "ended" in distillation.row_of("TRL", [found, {"error": "ended"}], [found])
