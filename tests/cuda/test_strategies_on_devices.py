"""Strategies in a world of one device: process group (NCCL on a GPU), shards, adapter and merged model."""

import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from command_line import ENVIRONMENT, losses
from devices import TINY, accelerator_of, cases
from forked_commands import run_forked

pytestmark = pytest.mark.slow

ROOT = Path(TINY).parents[1]
RECIPES = "ddp fsdp fsdp_offload deepspeed_zero1 deepspeed_zero2 deepspeed_zero2_offload deepspeed_zero3".split()
STRATEGIES = {name: ["--config", f"recipes/strategies/{name}.yaml"] for name in RECIPES}
STRATEGIES["model_parallel"] = ["--trainer.strategy.class_path", "lit_ft.strategies.ModelParallelStrategy"]


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Function that runs three steps of the quickstart once, with options, and gives the run's folder."""

    @cache
    def fit(device: str, *options: str) -> Path:
        run = tmp_path_factory.mktemp("runs") / "run"
        words = ["fit", "--config", "recipes/quickstart.yaml", *options, "--run_dir", str(run)]
        words += ["--trainer.accelerator", accelerator_of(device), "--trainer.devices", "1"]
        words += ["--trainer.max_steps", "3", "--trainer.log_every_n_steps", "1", "--trainer.callbacks", "[]"]
        if device == "cpu":
            ended = run_forked(*words, env=ENVIRONMENT, cwd=ROOT)
        else:  # a fork of a process that has used CUDA cannot use it
            ended = subprocess.run(
                [sys.executable, "-m", "lit_ft", *words],
                env=ENVIRONMENT,
                cwd=ROOT,
                capture_output=True,
                text=True,
                check=False,
                timeout=240,
            )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return run

    return fit


@pytest.mark.parametrize(("device", "options"), cases({"fsdp": STRATEGIES["fsdp"]}, STRATEGIES))
def test_a_world_of_one_has_the_losses_of_one_device(
    device: str, options: list[str], fitted: Callable[..., Path]
) -> None:
    if any("deepspeed" in option for option in options):
        pytest.importorskip("deepspeed")
    one, run = fitted(device), fitted(device, *options)
    assert len(losses(one)) == 3
    assert losses(run) == pytest.approx(losses(one), rel=1e-4)
    assert (run / "merged" / "config.json").is_file()
