"""Private API of Lightning, and attributes of its Trainer that it documents but does not declare."""

from typing import Protocol, cast

from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.profilers import Profiler


class TrainerAttributes(Protocol):
    """Public attributes that Lightning's connectors give to a Trainer, where type checkers do not see them."""

    callbacks: list[Callback]
    datamodule: LightningDataModule | None
    log_every_n_steps: int
    profiler: Profiler


def attributes_of(trainer: Trainer) -> TrainerAttributes:
    """The same trainer, as the type that has these attributes."""
    return cast(TrainerAttributes, trainer)


def disable_signal_handlers(trainer: Trainer) -> None:
    """Keep Lightning from installing its signal handlers.

    Its SIGTERM handler broadcasts, whatever the other ranks do at that moment, and its handler of SLURM's signal saves
    within an optimizer step. There is no public way to disable them. What its SIGTERM handler has noted, each rank
    broadcasts before each micro-batch, and the host waits for a GPU to read it: that is left out too.
    """
    trainer._signal_connector.register_signal_handlers = _nothing  # type: ignore[method-assign]
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = _nothing  # type: ignore[method-assign]


def enable_signal_handlers(trainer: Trainer) -> None:
    """Undo ``disable_signal_handlers``."""
    vars(trainer._signal_connector).pop("register_signal_handlers", None)
    vars(trainer.fit_loop.epoch_loop).pop("_broadcast_sigterm_tensor", None)


def save_and_requeue(trainer: Trainer, signal_number: int) -> None:
    """Save a checkpoint and requeue the SLURM job, as Lightning does when SLURM's signal arrives."""
    trainer._signal_connector._slurm_sigusr_handler_fn(signal_number, None)  # type: ignore[arg-type]


def _nothing() -> None:
    """Replacement of what is disabled; does nothing."""
