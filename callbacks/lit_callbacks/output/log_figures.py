"""Metrics of a callback for a trainer's loggers."""

from collections.abc import Mapping

import torch
from lightning.pytorch import Trainer

from lit_callbacks.internals.lightning_internals import logged_step


def log_figures(trainer: Trainer, figures: Mapping[str, float]) -> None:
    """Log metrics of the current step to every logger, and to ``trainer.callback_metrics`` for callbacks that monitor.

    They get the number and the epoch that Lightning gives to what modules log in this step.

    The module's ``log`` is not used, as in Lightning's own monitors: it takes some 0.3 ms per metric, and Lightning
    visits all metrics of an epoch again in each step.

    Args:
        trainer: trainer of the run.
        figures: values by metric name.
    """
    # On the CPU: no transfer to the device, and a callback compares a metric with its own earlier values only.
    trainer.callback_metrics.update(zip(figures, torch.tensor(list(figures.values())), strict=True))
    for logger in trainer.loggers:
        logger.log_metrics({"epoch": float(trainer.current_epoch), **figures}, step=logged_step(trainer))
