"""Supervised tokens of an optimizer step, by whose number the loss of each of its micro-batches is weighted."""

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_ft import process
from lit_ft.packed_batch import PackedBatch


def loss_weight(*, window_tokens: int, accumulate: int, replicas: int) -> float:
    """Factor on a micro-batch's summed loss that makes the optimizer step's gradient token-exact.

    The step's loss is the sum over all its micro-batches (its window) and ranks, divided by ``window_tokens``, the
    number of supervised tokens in all of them. Lightning divides by ``accumulate`` and the strategy averages gradients
    over ``replicas``: this factor reverses both.
    """
    return accumulate * replicas / max(window_tokens, 1)


class TokenWindow:
    """Number of supervised tokens, over all ranks, of the current optimizer step."""

    def __init__(self) -> None:
        """Start outside of any step."""
        self.tokens: int | None = None
        """None before the first micro-batch, and after a checkpoint was loaded."""

    def enter(self, trainer: Trainer, batch: PackedBatch, batch_idx: int) -> None:
        """Count the step's tokens at its first micro-batch; a collective.

        Args:
            trainer: trainer of the run.
            batch: micro-batch.
            batch_idx: index of the micro-batch in the epoch.
        """
        accumulate = trainer.accumulate_grad_batches
        if batch_idx % accumulate == 0 or self.tokens is None or "window_tokens" not in batch:
            self.tokens = _count(trainer, batch, accumulate)

    def weight(self, trainer: Trainer) -> float:
        """Factor on the summed loss of a micro-batch of the step."""
        assert self.tokens is not None, "the micro-batch has entered the window"
        replicas = process.data_parallel(trainer).size
        return loss_weight(window_tokens=self.tokens, accumulate=trainer.accumulate_grad_batches, replicas=replicas)


def _count(trainer: Trainer, batch: PackedBatch, accumulate: int) -> int:
    tokens = batch.get("window_tokens")
    if tokens is None:
        if accumulate > 1:
            rank_zero_warn(
                f"accumulate_grad_batches={accumulate}, but the batches carry no 'window_tokens': the loss is the "
                "mean of micro-batch means, not over the tokens of the step. lit_ft.TextDataModule counts them"
            )
        tokens = len(batch["targets"]) * accumulate
    if process.data_parallel(trainer).size == 1:
        return tokens
    on_device = torch.tensor(tokens, device=trainer.strategy.root_device)
    return int(trainer.strategy.reduce(on_device, reduce_op="sum")) // process.model_parallel_size(trainer)
