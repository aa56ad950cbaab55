"""Gradient accumulation: micro-batches per optimizer step, also with Lightning's ``GradientAccumulationScheduler``."""

import math

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lit_callbacks.internals.lightning_internals import attributes_of

from lit_ft.internals.lightning import begun_micro_batches, running_epoch


def accumulation(trainer: Trainer, epoch: int | None = None) -> int:
    """Number of micro-batches per optimizer step in an epoch.

    The trainer's attribute alone is not reliable: the scheduler sets it when an epoch starts, which is after the first
    row of a stream was drawn, and not at all in an epoch that a resumed run continues.

    Args:
        trainer: Lightning trainer, with its callbacks.
        epoch: epoch, counted from 0; None is the running epoch, or the next one.
    """
    if (scheduler := _scheduler(trainer)) is None:
        return int(trainer.accumulate_grad_batches)
    return int(scheduler.get_accumulate_grad_batches(running_epoch(trainer) if epoch is None else epoch))


def optimizer_steps(trainer: Trainer) -> int | float:
    """Number of optimizer steps of the run, infinity or below 0 where it has no end; opens the training data.

    When a resumed run starts, its earlier epochs count with the steps that they had, on more or fewer ranks perhaps.
    """
    steps = trainer.estimated_stepping_batches
    begun, batches = begun_micro_batches(trainer), trainer.num_training_batches
    if (_scheduler(trainer) is None and begun is None) or trainer.max_epochs in (None, -1) or math.isinf(batches):
        return steps
    first = 0 if begun is None else running_epoch(trainer)
    taken = 0 if begun is None else trainer.global_step - math.ceil(begun / accumulation(trainer, first))
    epochs = range(first, max(trainer.max_epochs, 1))
    steps = taken + sum(math.ceil(batches / accumulation(trainer, epoch)) for epoch in epochs)
    return steps if trainer.max_steps == -1 else min(steps, trainer.max_steps)


def warn_of_least_steps(trainer: Trainer) -> None:
    """Warn if ``trainer.min_steps`` is more than the steps of the run, which ends all the same."""
    steps, least = optimizer_steps(trainer), trainer.min_steps or 0
    if 0 <= steps < least:
        rank_zero_warn(
            f"trainer.min_steps={least}, but the run ends after {steps:g} optimizer steps (trainer.max_epochs="
            f"{trainer.max_epochs}); raise max_epochs for more"
        )


def _scheduler(trainer: Trainer) -> GradientAccumulationScheduler | None:
    schedulers = (one for one in attributes_of(trainer).callbacks if isinstance(one, GradientAccumulationScheduler))
    return next(schedulers, None)
