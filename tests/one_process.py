"""Fits in the test process that record losses."""

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
