"""Supervised tokens of an optimizer step, by whose number the loss of each of its micro-batches is weighted."""

from math import inf

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lit_callbacks.distributed.all_reduce import all_reduce
from torch import Tensor

from lit_ft import process
from lit_ft.packed_batch import PackedBatch, terms_of_mean


def loss_weight(*, window_tokens: int | Tensor, accumulate: int, replicas: int) -> float | Tensor:
    """Factor on a micro-batch's summed loss that makes the optimizer step's gradient token-exact.

    The step's loss is the sum over all its micro-batches (its window) and ranks, divided by ``window_tokens``, the
    number of supervised tokens in all of them. Lightning divides by ``accumulate`` and the strategy averages gradients
    over ``replicas``: this factor reverses both. For a tensor of tokens it is a scalar tensor, fp32, rounded once.
    """
    if isinstance(window_tokens, Tensor):
        return (accumulate * replicas / window_tokens.clamp(min=1).double()).float()
    return accumulate * replicas / max(window_tokens, 1)


class TokenWindow:
    """Number of supervised tokens, over all ranks, of the current optimizer step."""

    def __init__(self) -> None:
        self.tokens: int | Tensor | None = None
        """None before the first micro-batch, and after a checkpoint was loaded. With several replicas a scalar on the
        device, int64: the host does not wait for their sum."""

    def enter(self, trainer: Trainer, batch: PackedBatch, batch_idx: int) -> None:
        """Count the step's tokens at its first micro-batch; a collective."""
        accumulate = trainer.accumulate_grad_batches
        if batch_idx % accumulate == 0 or self.tokens is None or "window_tokens" not in batch:
            begun = batch_idx - batch_idx % accumulate
            self.tokens = _count(trainer, batch, min(accumulate, trainer.num_training_batches - begun))

    def weight(self, trainer: Trainer) -> float | Tensor:
        """Factor on the summed loss of a micro-batch of the step."""
        assert self.tokens is not None, "the micro-batch has entered the window"
        replicas = process.data_parallel(trainer).size
        return loss_weight(window_tokens=self.tokens, accumulate=trainer.accumulate_grad_batches, replicas=replicas)

    def mean(self, loss: Tensor) -> Tensor:
        """The step's mean loss, and 0 for a step without a supervised token, whose mean is NaN and harmless."""
        assert self.tokens is not None, "the micro-batch has entered the window"
        if isinstance(self.tokens, Tensor):
            return torch.where(self.tokens > 0, loss, 0)
        return loss if self.tokens else torch.zeros_like(loss)


def _count(trainer: Trainer, batch: PackedBatch, micro_batches: int | float) -> int | Tensor:
    """Tokens of a window, over all ranks; ``micro_batches`` is its length, up to that where the loader has none."""
    tokens = batch.get("window_tokens")
    if tokens is None:
        if micro_batches > 1:
            last = "" if trainer.num_training_batches < inf else ", and a shorter last step of an epoch counts less"
            rank_zero_warn(
                f"accumulate_grad_batches={trainer.accumulate_grad_batches}, but the batches carry no 'window_tokens': "
                "gradients are those of the mean of micro-batch means, while train/loss is the mean over the tokens of "
                f"the step{last}. lit_ft.TextDataModule counts them"
            )
        tokens = terms_of_mean(batch) * int(micro_batches)
        if not tokens:
            rank_zero_warn(
                "a batch of this loader has no supervised token, and trains nothing: its labels are all -100, or only "
                "the first token of a sample has another"
            )
    if process.data_parallel(trainer).size == 1:
        return tokens
    # Filled there: torch.tensor would copy, and wait.
    on_device = torch.full((), tokens, device=trainer.strategy.root_device)
    return all_reduce(trainer, on_device, "sum") // process.model_parallel_size(trainer)
