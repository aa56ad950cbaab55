"""Comparison of fits under a strategy with a fit in one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from safetensors.torch import load_file
from shared_fixtures import record_difference


class Record(Callback):
    """Callback that records the loss and the gradient norm of each optimizer step."""

    def __init__(self, save_after: int | None, path: str | None) -> None:
        self.steps: list[tuple[float, float]] = []
        self.save_after, self.path = save_after, path

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.fit_loop._should_accumulate():
            return
        metrics = trainer.callback_metrics
        self.steps.append((float(metrics["train/loss"]), float(metrics["train/grad_norm"])))
        if trainer.global_step == self.save_after:
            trainer.save_checkpoint(self.path)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4)


def load_whole(folder: Path) -> dict[str, torch.Tensor]:
    """All weights in a folder, from one file or several."""
    return {name: weight for file in sorted(folder.glob("*.safetensors")) for name, weight in load_file(file).items()}


def assert_same(steps: Any, found: Any, wanted: Any, weights: Any, tolerance: float, what: str = "") -> None:
    """Compare the losses and gradient norms of all steps, and the final weights."""
    assert len(steps) == len(wanted)
    for got, want in zip(steps, wanted, strict=True):
        assert got == pytest.approx(want, rel=tolerance)
    assert found.keys() == weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(found[name], weight, atol=tolerance, rtol=tolerance, msg=f"{what} {name}")
    record_difference(
        [(got[0], want[0]) for got, want in zip(steps, wanted, strict=True)],
        [(found[name], weight) for name, weight in weights.items()],
    )
