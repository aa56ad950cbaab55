"""Metrics of a callback for a trainer's loggers."""

from collections.abc import Mapping

import torch
from lightning.pytorch import Trainer


def log_figures(trainer: Trainer, figures: Mapping[str, float], step: int) -> None:
    """Log metrics to every logger, and to ``trainer.callback_metrics`` for callbacks that monitor them.

    The module's ``log`` is not used, as in Lightning's own monitors: it takes some 0.3 ms per metric, and Lightning
    visits all metrics of an epoch again in each step.

    Args:
        trainer: trainer of the run.
        figures: values by metric name.
        step: optimizer steps done before the measured one, as Lightning numbers the metrics that modules log.
    """
    # On the CPU: no transfer to the device, and a callback compares a metric with its own earlier values only.
    trainer.callback_metrics.update(zip(figures, torch.tensor(list(figures.values())), strict=True))
    for logger in trainer.loggers:
        logger.log_metrics(dict(figures), step=step)
