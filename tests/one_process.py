"""Fits in the test process that record losses and gradients."""

import os
import signal
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback
from peft import LoraConfig

from lit_ft import CausalLM, TextDataModule

STEPS = 5


class Losses(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if len(self.losses) < trainer.global_step:
            self.losses.append(float(trainer.callback_metrics["train/loss"]))


def train(
    make_trainer: Callable[..., Any],
    model_folder: str,
    path: str,
    *,
    peft: LoraConfig | None = None,
    accumulate: int = 1,
    model: dict[str, Any] | None = None,
    trainer: dict[str, Any] | None = None,
    **data: Any,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    losses = Losses()
    module = CausalLM(model_folder, peft=peft, optimizer=sgd, **(model or {}))
    make_trainer(max_steps=STEPS, accumulate_grad_batches=accumulate, callbacks=[losses], **(trainer or {})).fit(
        module, TextDataModule(path, **data)
    )
    return losses.losses, {name: p.detach().clone() for name, p in module.trainable_parameters().items()}


class Numbers(Callback):
    """Losses and gradients of each step."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.gradients: list[torch.Tensor] = []
        self.padding: torch.Tensor | None = None

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.gradients += [p.grad.clone() for p in pl_module.trainable_parameters().values()]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))
        self.padding = trainer.callback_metrics.get("train/padding_share")


def numbers(make_trainer: Any, model_folder: str, rows: str, callbacks: Any = (), **options: Any) -> Numbers:
    found = Numbers()
    trainer = make_trainer(max_steps=3, callbacks=[found, *callbacks])
    trainer.fit(CausalLM(model_folder, **options), TextDataModule(rows, micro_batch_size=4, shuffle=False))
    assert len(found.losses) == 3
    return found


class Signal(Callback):
    """Callback that sends a signal to this process during a micro-batch."""

    def __init__(self, step: int, number: signal.Signals = signal.SIGINT) -> None:
        self.step, self.number = step, number

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        if trainer.global_step == self.step:
            self.step = -1
            os.kill(os.getpid(), self.number)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    # SGD: Adam turns rounding on near-zero gradients into differences of the size of the learning rate.
    return torch.optim.SGD(parameters, lr=0.1)
