"""Private API of Lightning, and attributes of its Trainer that it documents but does not declare."""

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol, cast

from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.profilers import Profiler

from lit_callbacks.either_package import is_a


class TrainerAttributes(Protocol):
    """Public attributes that Lightning's connectors give to a Trainer, where type checkers do not see them."""

    callbacks: list[Callback]
    datamodule: LightningDataModule | None
    fast_dev_run: int | bool
    limit_predict_batches: int | float
    limit_test_batches: int | float
    limit_val_batches: int | float
    log_every_n_steps: int
    profiler: Profiler


def attributes_of(trainer: Trainer) -> TrainerAttributes:
    """The same trainer, as the type that has these attributes."""
    return cast(TrainerAttributes, trainer)


def logged_step(trainer: Trainer) -> int:
    """Number under which Lightning logs what modules log in the current step, counted from 0.

    It counts one per step, for any number of optimizers, which the public ``global_step`` does not.
    """
    return trainer.fit_loop.epoch_loop._batches_that_stepped


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


def cluster_environment(trainer: Trainer) -> ClusterEnvironment | None:
    """Environment that has started the processes, e.g. SLURM; strategies of one device have no such attribute."""
    return trainer._accelerator_connector.cluster_environment


def save_and_requeue(trainer: Trainer, signal_number: int, path: str | None) -> None:
    """Save a checkpoint and requeue the SLURM job, as Lightning does when SLURM's signal arrives.

    Args:
        trainer: trainer of the run.
        signal_number: number of the signal.
        path: path of the checkpoint; None is Lightning's own, ``hpc_ckpt_1.ckpt`` and so on in ``default_root_dir``.
    """
    connector = trainer._checkpoint_connector
    if path is not None:
        connector.hpc_save_path = lambda folder: path  # type: ignore[method-assign, assignment]
    trainer._signal_connector._slurm_sigusr_handler_fn(signal_number, None)  # type: ignore[arg-type]
    vars(connector).pop("hpc_save_path", None)


def delay_kill(seconds: float) -> Callable[[], None]:
    """Let Lightning wait before it kills all processes that it has started, because one of them has failed.

    A thread of rank 0 looks for failed ones every five seconds, and ends all by SIGKILL, rank 0 too, without a word.
    There is no public way to change that.

    Returns:
        Function that undoes it.
    """
    observers = [one for one in threading.enumerate() if is_a(one, _ChildProcessObserver)]
    for observer in observers:
        observer._terminate_all = partial(_after, seconds, observer._terminate_all)  # type: ignore[method-assign]

    def undo() -> None:
        for observer in observers:
            vars(observer).pop("_terminate_all", None)

    return undo


def _after(seconds: float, action: Callable[[], None]) -> None:
    time.sleep(seconds)
    action()


def _nothing() -> None:
    """Replacement of what is disabled; does nothing."""
