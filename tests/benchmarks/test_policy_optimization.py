import argparse
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import policy_optimization
from benchmarks.peers import lit_ft_grpo
from benchmarks.peers.text_reward import length_of


@pytest.mark.parametrize("is_lora", [False, True])
def test_a_run_and_its_row_of_the_table(tmp_path: Path, is_lora: bool) -> None:
    """lit_ft's side; TRL's needs its environment."""
    options = argparse.Namespace(
        data="recipes/data/quickstart_train.json",
        shape="tiny",
        device="cpu",
        prompts=6,
        micro_batch_size=1,
        accumulate=2,
        max_length=64,
    )
    job = policy_optimization.prepare(tmp_path, options)
    given = {"adapter": str(tmp_path / "adapter") if is_lora else None, "epochs": 1, "answers": 3, "new_tokens": 4}
    measured = lit_ft_grpo.run(replace(job, folder=str(tmp_path), options=given))
    assert len(measured.losses) == len(measured.rewards) == 3
    assert len(measured.ends) == len(measured.processor_ends) == 4  # the beginning, and the ends of the steps
    assert measured.tokens is not None
    assert all(0 < tokens <= 2 * 3 * 4 for tokens in measured.tokens)
    assert all(reward > 0 for reward in measured.rewards)
    assert any(measured.losses)  # rewards differ
    found = {
        "ends": [1.0, 2.0, 3.0, 5.0],
        "processor_ends": [0.5, 1.0, 1.5, 3.5],
        "peak_memory_bytes": 2**30,
        "losses": [0.1, 0.2, 0.3],
        "rewards": [0.25, 0.5, 0.75],
        "tokens": [24, 24, 24],
    }
    slow = {**found, "ends": [1.0, 3.0, 5.0, 9.0]}
    row = policy_optimization.row_of("TRL", [slow, slow], [found, found])
    assert row == "| TRL | 2.67 (+-0.00) | 2.00x | 1.00 (+-0.00) | 1.00x | 9 | 1,024 MiB | 0.250 | 0.750 |"
    assert "ended" in policy_optimization.row_of("TRL", [found, {"error": "ended"}], [found])


def test_the_reward_of_all_contestants_does_not_see_white_space() -> None:
    assert length_of(" ae x\n") == length_of("aex") == pytest.approx(0.03)
