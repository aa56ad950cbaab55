"""Stop on Ctrl-C or SIGTERM without losing anything."""

import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn


class StopRequested(Exception):
    """Raised out of ``trainer.fit`` once the run is saved."""

    def __init__(self, signal_number: int, checkpoint: str) -> None:
        """Keep what a command line reports.

        Args:
            signal_number: the signal that asked to stop.
            checkpoint: path of the file that ``fit(ckpt_path=...)`` resumes from.
        """
        super().__init__(f"stopped by {signal.Signals(signal_number).name}; saved {checkpoint}")
        self.signal_number = signal_number
        self.checkpoint = checkpoint

    @property
    def exit_code(self) -> int:
        """128 + signal, as shells have it: 130 for Ctrl-C, 143 for SIGTERM."""
        return 128 + self.signal_number


class GracefulStop(Callback):
    """Finish the optimiser step, save a checkpoint, then stop, when asked to by SIGINT or SIGTERM.

    Stopping between optimiser steps is what makes a resumed run equal to one that was not stopped: no
    half-accumulated gradient is lost. All ranks stop together, whichever got the signal. A second
    signal stops at once, with what the last checkpoint holds.
    """

    def __init__(self, checkpoint: str | Path | None = None) -> None:
        """Choose where to save.

        Args:
            checkpoint: the file to write; None is ``last.ckpt`` in the checkpoint callback's folder, or in
                ``trainer.default_root_dir`` where there is none.
        """
        self.checkpoint = checkpoint
        self._received: int | None = None
        self._stop: StopRequested | None = None
        self._previous: dict[int, Any] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take over the signals; after Lightning, whose own SIGTERM handler stops within a step."""
        if threading.current_thread() is not threading.main_thread():
            rank_zero_warn("GracefulStop sees no signals: training runs outside the main thread")
            return
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._receive)

    def _receive(self, number: int, _: FrameType | None) -> None:
        if self._received is not None:
            self._restore()
            raise KeyboardInterrupt
        self._received = number
        rank_zero_info(
            f"\n{signal.Signals(number).name}: finishing this optimiser step, saving, then stopping (again: stop now)"
        )

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save here if asked to stop and no gradient is half accumulated."""
        if (batch_idx + 1) % trainer.accumulate_grad_batches and not trainer.is_last_batch:
            return
        # One rank may have got the signal alone: all of them decide together.
        if trainer.strategy.reduce_boolean_decision(self._received is not None, all=False):
            path = str(self.checkpoint or self._default_path(trainer))
            if isinstance(trainer.checkpoint_callback, ModelCheckpoint):
                trainer.checkpoint_callback.last_model_path = path  # else the resumed run writes last-v1.ckpt beside it
            trainer.save_checkpoint(path)
            self._stop = StopRequested(self._received or signal.SIGTERM, path)

    def _leave(self) -> None:
        # Not in on_train_batch_end: the step's metrics are logged after that hook.
        if self._stop is not None:
            raise self._stop

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Stop before the next batch."""
        self._leave()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop before validation."""
        self._leave()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop at the end of the epoch."""
        self._leave()

    @staticmethod
    def _default_path(trainer: Trainer) -> Path:
        folder = getattr(trainer.checkpoint_callback, "dirpath", None)
        return Path(folder or trainer.default_root_dir) / "last.ckpt"

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Give the signals back."""
        self._restore()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Give the signals back."""
        self._restore()
