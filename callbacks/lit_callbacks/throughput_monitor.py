"""Tokens per second of training, without what is not training."""

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn


def count_tokens(batch: Any) -> int | None:
    """Non-padding tokens of a batch with ``input_ids`` and, where it is padded, ``attention_mask``; None for others."""
    if not isinstance(batch, Mapping) or "input_ids" not in batch:
        return None
    mask = batch.get("attention_mask")
    return int(mask.sum()) if mask is not None else batch["input_ids"].numel()


class ThroughputMonitor(Callback):
    """Log ``throughput/tokens_per_second``: non-padding tokens that all devices trained on, per second.

    Where the train dataloader counts ``seconds_waited`` (as lit_ft's do), also ``throughput/data_wait``: the
    share of the time, 0 to 1, that this rank waited for its data.

    Measured over the last ``window`` optimiser steps by the wall clock, data loading and optimiser
    included; validation is taken out, and so is the first step (allocation, compilation). Logged at
    the trainer's ``log_every_n_steps``. The device is not synchronised: over a window, the queue's
    length does not matter.
    """

    def __init__(self, window: int = 20, count: Callable[[Any], int | None] = count_tokens) -> None:
        """Set what is counted, over how long.

        Args:
            window: optimiser steps that the rate is taken over.
            count: non-padding tokens of a batch, or None where it cannot tell.
        """
        self.window = window
        self.count = count
        self.total_tokens = 0
        """Tokens that this rank has trained on in this process, the first step left out."""
        self.total_seconds = 0.0
        """Seconds that they took."""
        self.total_waited = 0.0
        """Seconds of these that it waited for data."""
        self._steps: deque[tuple[int, float, float]] = deque(maxlen=window)
        self._waited = 0.0
        self._tokens = 0
        self._started: float | None = None
        self._paused_at: float | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget an earlier fit."""
        self._steps.clear()
        self._started, self._tokens = None, 0
        self.total_tokens, self.total_seconds, self.total_waited = 0, 0.0, 0.0

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the clock."""
        self._paused_at = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start it again."""
        if self._paused_at is not None and self._started is not None:
            self._started += time.perf_counter() - self._paused_at
        self._paused_at = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the batch; at the end of an optimiser step, take the time."""
        tokens = self.count(batch)
        if tokens is None:
            rank_zero_warn(
                f"ThroughputMonitor cannot count the tokens of a {type(batch).__name__} without 'input_ids', so no "
                "throughput is logged; pass count=<function from batch to int>"
            )
            return
        self._tokens += tokens
        if (batch_idx + 1) % trainer.accumulate_grad_batches and not trainer.is_last_batch:
            return
        now = time.perf_counter()
        waited = getattr(trainer.train_dataloader, "seconds_waited", 0.0)
        if self._started is not None:
            self._steps.append((self._tokens, now - self._started, waited - self._waited))
            self.total_tokens += self._tokens
            self.total_seconds += now - self._started
            self.total_waited += waited - self._waited
        self._started, self._tokens, self._waited = now, 0, waited
        if self._steps and trainer.global_step % trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
            pl_module.log("throughput/tokens_per_second", self._rate(trainer), prog_bar=True)
            if hasattr(trainer.train_dataloader, "seconds_waited"):
                waits, seconds = (sum(step[k] for step in self._steps) for k in (2, 1))
                pl_module.log("throughput/data_wait", waits / seconds)

    def _rate(self, trainer: Trainer) -> torch.Tensor:
        tokens = sum(tokens for tokens, _, _ in self._steps)
        seconds = sum(seconds for _, seconds, _ in self._steps)
        local = torch.tensor(tokens / seconds, device=trainer.strategy.root_device)
        return torch.as_tensor(trainer.strategy.reduce(local, reduce_op="sum"))
