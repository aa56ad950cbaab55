"""Schedules that read a metric: their step at the end of an epoch is in the checkpoint of that end."""

from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import LRSchedulerConfig, LRSchedulerTypeUnion

from lit_ft.checkpointing.fit_progress import FitProgress
from lit_ft.protocols import Checkpoint

_METRICS = "schedule_metrics"
"""Key of a checkpoint: last values of the metrics that schedules read, by name."""


class MetricSchedulesModule(LightningModule):
    """LightningModule whose ``ReduceLROnPlateau`` takes the same steps in a run that is stopped and resumed.

    Lightning steps it after the checkpoint of an epoch's end is written, and a run that resumes from there, or within
    an epoch, never takes that epoch's step (2.6).
    """

    def __init__(self) -> None:
        super().__init__()
        self._schedule_metrics: dict[str, float] = {}
        self._step_is_due = False
        """Whether a checkpoint was saved after an epoch's last micro-batch and before the epoch's end."""

    def on_train_start(self) -> None:
        """Restore the metrics of a resumed run, until they are logged again, and take the step that is due."""
        super().on_train_start()
        for name, value in self._schedule_metrics.items():
            self.trainer.callback_metrics[name] = torch.tensor(value)
        if self._step_is_due and not self.trainer.is_last_batch:  # else the epoch is still to be ended
            self._step_schedules(self.trainer.current_epoch)
        self._schedule_metrics, self._step_is_due = {}, False

    def _stepped_here(self) -> list[LRSchedulerConfig]:
        configs = self.trainer.lr_scheduler_configs
        return [config for config in configs if config.reduce_on_plateau and config.interval == "epoch"]

    def lr_scheduler_step(self, scheduler: LRSchedulerTypeUnion, metric: Any | None) -> None:
        """Take Lightning's step of other schedules: those that read a metric were stepped in ``on_train_epoch_end``."""
        if all(config.scheduler is not scheduler for config in self._stepped_here()):
            super().lr_scheduler_step(scheduler, metric)

    def on_train_epoch_end(self) -> None:
        """Step the schedules that read a metric, where the epoch is over and not merely the run."""
        super().on_train_epoch_end()
        if self.trainer.is_last_batch:
            self._step_schedules(self.trainer.current_epoch + 1)

    def _step_schedules(self, epochs: int) -> None:
        metrics = self.trainer.callback_metrics
        for config in self._stepped_here():
            if config.monitor in metrics and epochs % config.frequency == 0:
                super().lr_scheduler_step(config.scheduler, metrics[config.monitor])

    def on_save_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Save the metrics that schedules read."""
        super().on_save_checkpoint(checkpoint)
        metrics = self.trainer.callback_metrics
        monitors = [config.monitor for config in self._stepped_here()]
        if values := {name: float(metrics[name]) for name in monitors if name in metrics}:
            checkpoint[_METRICS] = values

    def on_load_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Keep the metrics until training starts."""
        super().on_load_checkpoint(checkpoint)
        self._schedule_metrics = checkpoint.get(_METRICS, {})
        progress = FitProgress(checkpoint)
        self._step_is_due = progress.epoch_is_over and not progress.epoch_has_ended
