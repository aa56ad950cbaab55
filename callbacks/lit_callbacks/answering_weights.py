"""Weights that a trained model answers with, where an optimizer keeps another set of them for training."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from lightning.pytorch import LightningModule, Trainer

from lit_callbacks.protocols import KeepsTwoWeightSets


@contextmanager
def weights_that_answer(trainer: Trainer, module: LightningModule) -> Iterator[None]:
    """Put schedule-free optimizers into ``eval()`` mode; at exit, restore the training weights bit by bit."""
    two_sets = [
        optimizer
        for optimizer in trainer.optimizers
        if isinstance(optimizer, KeepsTwoWeightSets) and optimizer.param_groups[0].get("train_mode", False)
    ]
    aside = [(p, p.detach().clone()) for p in module.parameters() if p.requires_grad] if two_sets else []
    for optimizer in two_sets:
        optimizer.eval()
    try:
        yield
    finally:
        for optimizer in two_sets:
            optimizer.train()
        with torch.no_grad():
            for parameter, weight in aside:
                parameter.copy_(weight)
