"""Comparison of fits under a strategy with a fit in one process."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lit_callbacks.distributed.gather import full_weights
from safetensors.torch import load_file
from shared_fixtures import record_difference

from lit_ft import TextDataModule
from lit_ft.checkpointing.storage.checkpoint_io import AnyCheckpointIO
from lit_ft.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy


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


class RecordMeans(Record):
    """Record that keeps what else each step measures, by the names of metrics."""

    def __init__(self, measured: Sequence[str], save_after: int | None, path: str | None) -> None:
        super().__init__(save_after, path)
        self.measured = measured
        self.means: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        count = len(self.steps)
        super().on_train_batch_end(trainer)
        if len(self.steps) > count:
            found = trainer.callback_metrics
            self.means.append({name: float(found[name]) for name in self.measured if name in found})


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


def _parallel(**options: Any) -> ModelParallelStrategy:
    return ModelParallelStrategy(timeout=timedelta(seconds=60), **options)


def _zero3() -> DeepSpeedStrategy:
    sharded = {"stage": 3, "stage3_param_persistence_threshold": 0}
    return DeepSpeedStrategy(config={"zero_optimization": sharded})


STRATEGIES: dict[str, tuple[Callable[[], Any], int, int]] = {
    "ddp": (partial(str, "ddp"), 2, 2),
    "fsdp": (FSDPStrategy, 2, 2),
    "zero3": (_zero3, 2, 2),
    "tp2": (partial(_parallel, tensor_parallel_size=2), 2, 1),
    "cp2": (partial(_parallel, context_parallel_size=2), 2, 1),
    "pp2": (partial(_parallel, pipeline_parallel_size=2), 2, 1),
    "cp2 x pp2": (partial(_parallel, context_parallel_size=2, pipeline_parallel_size=2), 4, 1),
}
"""Each with its number of ranks, and of replicas."""


def fit_in_steps_of_4(
    make_trainer: Any,
    module: LightningModule,
    data: TextDataModule,
    record: Record,
    how: dict[str, Any],
    world: int = 1,
    strategy: Any = "auto",
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Two epochs in optimizer steps of 4 samples; the last validation's means, and the final weights that train.

    ``how`` may have ``replicas`` (else ``world``), ``callbacks``, ``resume`` (a checkpoint) and ``trainer`` (options).
    """
    trainer = make_trainer(
        max_epochs=2,
        devices=world,
        strategy=strategy() if callable(strategy) else strategy,
        accumulate_grad_batches=4 // (data.micro_batch_size * how.get("replicas", world)),
        log_every_n_steps=1,
        gradient_clip_val=100.0,
        callbacks=[record, *how.get("callbacks", [])],
        use_distributed_sampler=False,
        plugins=[AnyCheckpointIO()],
        **how.get("trainer", {}),
    )
    trainer.fit(module, data, ckpt_path=how.get("resume"))
    means = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val/")}
    gather = getattr(trainer.strategy, "full_weights", full_weights)
    return means, gather(module, lambda _, p: p.requires_grad, keep=True)
