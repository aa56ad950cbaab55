"""Command-line runs for tests: recipes, environments and logged values."""

import csv
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from shared_fixtures import record_difference

from lit_ft.cli import main

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}


def recipe(tmp_path: Path, model_folder: str, data: str | None, **trainer: Any) -> list[str]:
    """Options of ``fit``: LoRA with dropout, SGD, fewer micro-batches in the last optimizer step of each epoch."""
    content = {
        "seed_everything": 3,
        "model": {
            "pretrained": model_folder,
            "peft": {
                "class_path": "peft.LoraConfig",
                "init_args": {
                    "r": 4,
                    "lora_alpha": 8,
                    "target_modules": ["q_proj", "v_proj"],
                    "init_lora_weights": False,
                },
            },
        },
        "data": {"path": data, "micro_batch_size": 2, "max_length": 96},
        "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}},
        "lr_scheduler": {"class_path": "lit_ft.schedules.LinearWithWarmup", "init_args": {"warmup": 0.2}},
        "trainer": {"accelerator": "cpu", "log_every_n_steps": 1, "enable_progress_bar": False, **trainer},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    return ["fit", "--config", str(path)]


def losses(run_dir: Path, name: str = "train/loss") -> dict[int, float]:
    with (run_dir / "metrics.csv").open() as file:
        return {int(row["step"]): float(row[name]) for row in csv.DictReader(file) if row[name]}


def assert_same_run(got: Path, wanted: Path, tolerance: float) -> None:
    assert losses(got).keys() == losses(wanted).keys()
    pairs = [(losses(got)[step], losses(wanted)[step]) for step in losses(wanted)]
    record_difference(pairs, [(weights(got)[name], tensor) for name, tensor in weights(wanted).items()])
    assert losses(got) == pytest.approx(losses(wanted), rel=tolerance, abs=tolerance)
    for name, tensor in weights(wanted).items():
        torch.testing.assert_close(weights(got)[name], tensor, atol=tolerance, rtol=tolerance, msg=name)


def run(capsys: Any, *arguments: str, code: int = 0) -> str:
    """Run a command in this process; returns what it wrote to stderr."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    errors = capsys.readouterr().err
    assert stop.value.code == code, errors
    return errors


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LIT_FT_RUN_DIR", raising=False)
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")


def here(monkeypatch: pytest.MonkeyPatch, *arguments: str, code: int = 0) -> None:
    """Run a command in this process."""
    monkeypatch.delenv("LIT_FT_RUN_DIR", raising=False)
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    assert stop.value.code == code


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return torch.load(run_dir / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
