"""Use the model in the middle of training, and leave no trace of it."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

_Result = TypeVar("_Result")


@contextmanager
def evaluating(trainer: Trainer, module: LightningModule) -> Iterator[None]:
    """Evaluation mode without gradients, in the run's precision; modes and random numbers are as before afterwards."""
    modes = {part: part.training for part in module.modules()}
    device = trainer.strategy.root_device
    module.eval()
    try:
        with (
            torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
            trainer.precision_plugin.forward_context(),
            torch.no_grad(),
        ):
            yield
    finally:
        for part, training in modes.items():
            part.training = training


def on_all_ranks(trainer: Trainer, what: str, do: Callable[[], _Result]) -> _Result | None:
    """What ``do`` returns; None on every rank where it raised on any, and a warning there. A collective.

    Whatever a model or a tokenizer comes up with, the run is worth more than what is measured on it.

    Args:
        trainer: of the run.
        what: for the warning, what cannot be done.
        do: called once, on this rank.
    """
    result: _Result | None = None
    try:
        result, went_well = do(), True
    except Exception as error:
        went_well = False
        warnings.warn(f"rank {trainer.global_rank}: {what} ({type(error).__name__}: {error})", stacklevel=2)
    return result if trainer.strategy.reduce_boolean_decision(went_well, all=True) else None


def written(what: str, write: Callable[[], Any]) -> bool:
    """Whether writing went well; a warning where it did not.

    Args:
        what: for the warning, what cannot be written and what to do.
        write: called once.
    """
    try:
        write()
    except OSError as error:
        rank_zero_warn(f"{what} ({error})")
        return False
    return True


class EveryNSteps:
    """Tells when some optimizer steps have passed, however many each batch takes."""

    def __init__(self, n: int) -> None:
        """Count from step 0.

        Args:
            n: optimizer steps.

        Raises:
            ValueError: it is not positive.
        """
        if n < 1:
            raise ValueError(f"every_n_steps={n} must be 1 or more")
        self.n = n
        self.last = -1
        """The step at which it was last time."""

    def is_time(self, step: int) -> bool:
        """Whether a multiple of ``n`` was passed since ``done``; with micro-batches, once."""
        return step // self.n > max(self.last, 0) // self.n

    def done(self, step: int) -> None:
        """It was done at this step."""
        self.last = step
