"""Private API of Lightning, as read in Lightning 2.6, and attributes of its Trainer that it does not declare."""

import traceback
from collections.abc import Collection
from itertools import pairwise
from pathlib import Path

import torch
from lightning.fabric.utilities.device_dtype_mixin import _DeviceDtypeModuleMixin
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import DDPStrategy, Strategy
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.swa_utils import AveragedModel

TRAINED = "current_model_state"
"""Key of the weights that are trained in a checkpoint of ``WeightAveraging``, whose ``state_dict`` is their average."""


def rank() -> int:
    """Rank of this process as Lightning knows it, also before a process group exists; type checkers do not see it."""
    return rank_zero_only.rank  # type: ignore[attr-defined]


def set_device_mesh(module: LightningModule, mesh: DeviceMesh) -> None:
    """Give a module the mesh that its public ``device_mesh`` returns, as Lightning's own strategy does."""
    module._device_mesh = mesh


def set_device(module: LightningModule, device: torch.device) -> None:
    """Set what the module's public ``device`` returns; ``module.to`` moves its weights as well."""
    for part in module.modules():
        if isinstance(part, _DeviceDtypeModuleMixin):
            part._device = device


def gives_weights_back(strategy: Strategy) -> bool:
    """Whether processes that it forks or spawns for a fit give their weights back to the Trainer's (`ddp_notebook`)."""
    return isinstance(strategy, DDPStrategy) and strategy._start_method != "popen"


def reduces_views(strategy: DDPStrategy) -> bool:
    """Whether DDP's buckets are the gradients themselves; Lightning keeps DDP's arguments in a private attribute."""
    return bool(strategy._ddp_kwargs.get("gradient_as_bucket_view"))


def validation_interval(trainer: Trainer) -> int | float | None:
    """``val_check_interval``; None where it is a time, for which Lightning sets no attribute.

    Lightning's own ``EarlyStopping`` reads the attribute all the same, so it is set.
    """
    trainer.val_check_interval = interval = getattr(trainer, "val_check_interval", None)  # type: ignore[assignment]
    return interval


def running_epoch(trainer: Trainer) -> int:
    """Index of the running epoch, or of the next one; the public ``current_epoch`` is behind in hooks at its end."""
    return trainer.fit_loop.epoch_progress.current.processed  # type: ignore[attr-defined]


def begun_micro_batches(trainer: Trainer) -> int | None:
    """Number of micro-batches of the running epoch that were begun before, as a resumed run starts; else None."""
    return None if trainer.ckpt_path is None else trainer.fit_loop.epoch_loop.batch_progress.current.ready


def is_at_start_of_step(trainer: Trainer) -> bool:
    """Whether the micro-batch that is on its way to the device is the first one of an optimizer step."""
    return trainer.fit_loop.epoch_loop.batch_progress.current.ready % trainer.accumulate_grad_batches == 0


def end_epoch_that_is_over(trainer: Trainer) -> None:
    """Let a resumed fit end an epoch whose last micro-batch is trained, at its beginning.

    Lightning ends it only where a validation is due there by the options of the resumed run; else it trains on one more
    micro-batch, of which there is none.
    """
    loop, fetcher = trainer.fit_loop.epoch_loop, trainer.fit_loop._data_fetcher
    advance = loop.advance

    def only_once(data_fetcher: object) -> None:
        loop.advance = advance  # type: ignore[method-assign]

    is_over = loop.restarting and loop._num_ready_batches_reached()
    if is_over and fetcher is not None and not loop._should_check_val_fx(fetcher):
        loop.advance = only_once  # type: ignore[method-assign]


def set_logged_steps(trainer: Trainer, steps: int) -> None:
    """Set the number under which Lightning logs the current step: a private counter, apart from ``global_step``."""
    trainer.fit_loop.epoch_loop._batches_that_stepped = steps


def is_about_to_log_a_step(trainer: Trainer) -> bool:
    """Whether an optimizer step is taken and Lightning has not logged it yet, as in ``on_train_batch_end``."""
    progress = trainer.fit_loop.epoch_loop.batch_progress.current
    is_trained = trainer.training and progress.processed != progress.completed  # type: ignore[attr-defined]
    return is_trained and not trainer.fit_loop._should_accumulate()


def logs_this_step(trainer: Trainer) -> bool:
    """Whether Lightning logs at the end of this step. No public API tells before."""
    return trainer._logger_connector.should_update_logs


def metrics_to_log(trainer: Trainer) -> dict[str, float] | None:
    """Metrics that Lightning logs at the end of this step; None if it logs none. No public API tells before."""
    metrics = trainer._logger_connector.metrics["log"]
    return {name: float(value) for name, value in metrics.items()} if logs_this_step(trainer) else None


class _PlacedMetric(_ResultMetric):
    """Logged value that Lightning searches for tensors to move only if it is on another device."""

    def to(self, device: torch.device) -> _ResultMetric:  # type: ignore[override]
        return self if self.value.device == device else super().to(device)


def place_logged_values(trainer: Trainer) -> None:
    """Let Lightning search a logged value for tensors to move once; it does so at each ``log``, which is slow."""
    for metric in (trainer._results or {}).values():
        if type(metric) is _ResultMetric and metric.is_tensor:
            metric.__class__ = _PlacedMetric


def forget_logged_values(trainer: Trainer, names: Collection[str]) -> None:
    """Log these metrics again when they have new values; Lightning logs the old ones at each step of an epoch."""
    for metric in (trainer._results or {}).values():
        if metric.meta.name in names:
            metric.reset()


def average_of(callback: WeightAveraging) -> AveragedModel | None:
    """Averaged copy of the module that a callback updates; None outside of a fit."""
    return callback._average_model


def has_saved(callback: ModelCheckpoint, step: int) -> bool:
    """Whether a ``ModelCheckpoint`` has written a checkpoint that can be resumed after an optimizer step."""
    return not callback.save_weights_only and callback._last_global_step_saved == step


def note_last_file(callback: ModelCheckpoint, path: Path) -> None:
    """Let a ``ModelCheckpoint`` take a file as its last one, which it replaces, rather than write ``last-v1.ckpt``.

    By the private attribute it also leaves the file alone when training ends, and links it to no older one.
    """
    callback.last_model_path = callback._last_checkpoint_saved = str(path)


def starting_logger(error: BaseException) -> Logger | None:
    """Logger whose ``experiment`` Lightning was asking for, before the module's set-up, when an error was raised."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    for caller, frame in pairwise(frames):
        logger = frame.f_locals.get("self")
        if caller.f_code is call._call_setup_hook.__code__ and isinstance(logger, Logger):
            return logger
    return None
