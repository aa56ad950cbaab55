"""State of a run: its finished marker, its session number, and exports that a killed run has not written."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lit_callbacks.durable_writes import write_durably
from lit_callbacks.internals.lightning_internals import attributes_of
from lit_callbacks.protocols import WritesAtTheEnd

from lit_ft.checkpointing.selection import SESSION, UNLOGGED, candidates
from lit_ft.errors import DISK_ERRORS, RecipeError
from lit_ft.internals import lightning as lightning_internals
from lit_ft.protocols import Checkpoint
from lit_ft.run.lock import check_still_there
from lit_ft.run.time_limit import time_left

ENDED_BY, MAX_TIME, EARLY_STOPPING = "ended_by", "max_time", "early_stopping"
"""Key in the finished marker, and its values in runs that have ended before their last step."""


class RunState(Callback):
    """Number the starts and resumptions of a run, mark it as finished, and write exports that a killed run lacks.

    Lightning does not call ``on_train_end`` when the resumed checkpoint is of the run's last step, so the exports of a
    run that was killed after its last checkpoint would never be written; this callback writes them.
    """

    def __init__(self, marker: Path, checkpoints: Path) -> None:
        """Set the paths.

        Args:
            marker: file that marks the run as finished, with its last optimizer step.
            checkpoints: folder of the run's checkpoints.
        """
        self.marker, self.checkpoints = marker, checkpoints
        self._session = 1
        self._finished_step: int | None = None
        self._unlogged: dict[str, float] | None = None
        self._is_logged = True
        """Whether the loggers get, or need not get, the newest step."""
        self._epoch = 0
        """Epoch of the newest step; Lightning has counted it when training ends."""
        self._has_trained = False
        """Whether this fit has trained on a micro-batch."""
        self._may_stop = False
        """Whether a callback that stops the run would make Lightning log the newest step."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Read the state that earlier processes left; the finished marker goes when the loop begins."""
        if trainer.is_global_zero:
            self._session = 1 + max(
                (candidate.position.session for candidate in candidates(self.checkpoints)[0]), default=0
            )
            self._finished_step = finished_step(self.marker)
        loop = trainer.fit_loop
        run = loop.run

        def run_or_finish() -> None:
            if trainer.is_global_zero:  # not before: a checkpoint that is read after this hook may be refused
                self.marker.unlink(missing_ok=True)
            loop.setup_data()
            is_over, self._has_trained = loop.done and trainer.limit_train_batches != 0, False
            run()
            if is_over:
                self._write_what_is_missing(trainer, pl_module)
            elif trainer.global_step and not self._has_trained:
                rank_zero_info(_why_nothing_is_trained(trainer))

        # Where nothing is left to train, Lightning calls no hook between restoring the checkpoint and tearing down the
        # strategy, after which sharded weights can no longer be gathered.
        loop.run = run_or_finish  # type: ignore[method-assign]

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: Checkpoint) -> None:
        """Add to the checkpoint the number of the start or resumption that wrote it, and metrics not yet logged."""
        self._check_folder(trainer)
        checkpoint[SESSION] = self._session
        if (metrics := _metrics_about_to_be_logged(trainer)) is not None:
            checkpoint[UNLOGGED] = metrics

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: Checkpoint) -> None:
        """Read metrics that the earlier process may not have logged, and adapt the saved state of callbacks."""
        self._unlogged = checkpoint.get(UNLOGGED)
        states = checkpoint.get("callbacks", {})
        for saver in self._savers_here(trainer):
            if (state := states.get(saver.state_key)) is not None:
                _follow_folder(saver, state)
        for stop in _early_stops(trainer):
            if (state := states.get(stop.state_key)) is not None:
                trainer.should_stop |= _goes_by_recipe(stop, state)

    def _savers_here(self, trainer: Trainer) -> list[ModelCheckpoint]:
        """Callbacks that save in the run folder, where the run goes on from one of its own checkpoints."""
        here = os.path.realpath(self.checkpoints)
        if os.path.realpath(Path(trainer.ckpt_path or "").parent) != here:
            return []
        savers = [one for one in trainer.checkpoint_callbacks if isinstance(one, ModelCheckpoint)]
        return [one for one in savers if os.path.realpath(one.dirpath or "") == here]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the metrics that the earlier process may not have logged, and say how much of ``max_time`` is left."""
        self._log_what_was_not(trainer)
        if trainer.global_step and (left := time_left(trainer)) is not None:
            time = timedelta(seconds=max(0, int(left)))
            rank_zero_info(f"{time} is left of trainer.max_time, which counts earlier time of the run too")

    def _log_what_was_not(self, trainer: Trainer) -> None:
        metrics, self._unlogged = self._unlogged, None
        for logger in trainer.loggers if metrics else []:
            logger.log_metrics(dict(metrics or {}), step=trainer.global_step - 1)
            logger.save()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Note whether Lightning logs the step that this micro-batch may end."""
        self._epoch, never = trainer.current_epoch, not attributes_of(trainer).log_every_n_steps
        self._is_logged, self._may_stop = never or lightning_internals.logs_this_step(trainer), True
        self._has_trained = True

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note whether the run was stopped before Lightning logged the step; a validation stops it after that."""
        self._note_stop(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note whether the run was stopped before Lightning logged the step."""
        self._note_stop(trainer)

    def _note_stop(self, trainer: Trainer) -> None:
        self._is_logged = self._is_logged or (self._may_stop and trainer.should_stop)
        self._may_stop = False

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check that the run folder still exists, and log the last step, before adapter and model card are written."""
        self._check_folder(trainer)
        self._log_last_step(trainer)

    def _log_last_step(self, trainer: Trainer) -> None:
        """Log the last step too where it is none of every ``log_every_n_steps``: console, card and report agree."""
        metrics = {name: float(v) for name, v in trainer.callback_metrics.items() if name.startswith("train/")}
        for logger in [] if self._is_logged else trainer.loggers:
            logger.log_metrics({"epoch": float(self._epoch), **metrics}, step=trainer.global_step - 1)

    def _check_folder(self, trainer: Trainer) -> None:
        # Saving a checkpoint creates a missing folder, so the run would end without error, but without earlier files.
        if trainer.is_global_zero:
            check_still_there(self.marker.parent)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Mark the run as finished."""
        if trainer.is_global_zero:
            end: dict[str, object] = {"global_step": trainer.global_step}
            if trainer.should_stop and _time_is_over(trainer):
                end[ENDED_BY] = MAX_TIME
            elif _stopped_early(trainer):
                end[ENDED_BY] = EARLY_STOPPING
            write_durably(self.marker, json.dumps(end) + "\n")

    def _write_what_is_missing(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._log_what_was_not(trainer)
        is_newer = trainer.strategy.broadcast(self._finished_step) != trainer.global_step
        callbacks = attributes_of(trainer).callbacks
        rank_zero_info(_why_nothing_is_trained(trainer))
        for callback in callbacks:
            if isinstance(callback, WritesAtTheEnd):
                callback.write_final(trainer, pl_module, only_missing=not is_newer)


def _follow_folder(saver: ModelCheckpoint, state: dict[str, Any]) -> None:
    """Let the paths in a saved state, changed in place, follow the run folder, which was moved or copied since.

    Lightning would forget the best checkpoints of a callback that saved elsewhere.
    """
    before, now = state.get("dirpath"), str(saver.dirpath)
    if before is None:
        return
    for name in ("best_model_path", "kth_best_model_path", "last_model_path"):
        state[name] = _moved(state[name], before, now)
    state["best_k_models"] = {_moved(path, before, now): score for path, score in state["best_k_models"].items()}
    state["dirpath"] = now


def _moved(path: str, before: str, now: str) -> str:
    return str(Path(now) / Path(path).relative_to(before)) if Path(path).is_relative_to(before) else path


def _early_stops(trainer: Trainer) -> list[EarlyStopping]:
    return [one for one in attributes_of(trainer).callbacks if isinstance(one, EarlyStopping)]


def _stopped_early(trainer: Trainer) -> bool:
    return trainer.should_stop and any(_has_stopped(stop, stop.state_dict()) for stop in _early_stops(trainer))


def _has_stopped(stop: EarlyStopping, state: Mapping[str, Any]) -> bool:
    """Whether a state of ``EarlyStopping`` is that of a run that it has ended, by the options of the callback."""
    order, message = stop.order_dict[stop.mode], state.get("stopping_reason_message") or ""
    still_holds = {
        EarlyStoppingReason.PATIENCE_EXHAUSTED: stop.patience <= state.get("patience", stop.patience),
        EarlyStoppingReason.NON_FINITE_METRIC: stop.check_finite,
        # The state has thresholds in its message only.
        EarlyStoppingReason.STOPPING_THRESHOLD: f" {order} {stop.stopping_threshold}. " in message,
        EarlyStoppingReason.DIVERGENCE_THRESHOLD: f" {order} {stop.divergence_threshold}. " in message,
    }
    reason = EarlyStoppingReason(state.get("stopping_reason", EarlyStoppingReason.NOT_STOPPED.value))
    return still_holds.get(reason, False) or state.get("wait_count", 0) >= max(1, stop.patience)


def _goes_by_recipe(stop: EarlyStopping, state: dict[str, Any]) -> bool:
    """Set the saved state of ``EarlyStopping``, in place, to the recipe's patience, which loading it would replace.

    Returns:
        Whether it has ended the run, so that nothing is left to train.
    """
    if not (has_stopped := _has_stopped(stop, state)):  # an old reason is none of a later end
        state |= {"stopping_reason": EarlyStoppingReason.NOT_STOPPED.value, "stopping_reason_message": None}
    if (before := state.get("patience", stop.patience)) != stop.patience:
        rank_zero_info(f"EarlyStopping: patience is {stop.patience}, no longer {before}")
        state["patience"] = stop.patience
    return has_stopped


def _why_nothing_is_trained(trainer: Trainer) -> str:
    """Message about a run that is resumed after its last step, with the option that ends it."""
    step = f"{trainer.global_step:,}"
    if _time_is_over(trainer):
        return (
            "trainer.max_time, or the duration of a Timer, counts from the start of the run, and was over at step "
            f"{step}: nothing is trained; to go on, resume with a longer one"
        )
    if _stopped_early(trainer):
        return (
            f"EarlyStopping ended the run at step {step}: nothing is left to train; to go on, raise its patience, or "
            "change the threshold that was reached"
        )
    end, advice = f"trainer.max_epochs={trainer.max_epochs}", "raise it"
    if 0 <= trainer.max_steps <= trainer.global_step:
        end = f"trainer.max_steps={trainer.max_steps}"
    elif trainer.max_steps > 0:
        advice = f"set it to -1, and the run ends by trainer.max_steps={trainer.max_steps}"
    return f"the run was at its last step, {step}, already ({end}): nothing is left to train; to go on, {advice}"


def _time_is_over(trainer: Trainer) -> bool:
    return (time_left(trainer) or 1.0) < 0


def _metrics_about_to_be_logged(trainer: Trainer) -> dict[str, float] | None:
    """Metrics of a step whose checkpoint is written before Lightning logs them; None at any other time.

    Lightning logs a step after ``on_train_batch_end``, where most checkpoints are written, and has no public access to
    the metrics that it is about to log.
    """
    if not lightning_internals.is_about_to_log_a_step(trainer):
        return None
    metrics = lightning_internals.metrics_to_log(trainer)
    return {} if metrics is None else {"epoch": float(trainer.current_epoch), **metrics}


@contextmanager
def explained_full_disk(trainer: Trainer, checkpoints: Path) -> Iterator[None]:
    """Say of a full disk which steps are saved, and how to go on, where the run has a checkpoint.

    Raises:
        RecipeError: in place of the system's error.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_ERRORS or not (saved := candidates(checkpoints)[0]):
            raise
        step, what = saved[0].position.global_step, f"{error.filename!r}" if error.filename else "a file"
        steps = f"all {step:,} steps are" if step == trainer.global_step else f"step {step:,} is"
        raise RecipeError(
            f"{what} could not be written: {error.strerror}; {steps} saved: make room, then give the same command with "
            "--resume auto (or --ckpt_path last)"
        ) from error


def finished_step(marker: Path) -> int | None:
    """Last optimizer step of a finished run; None if the run is not finished."""
    try:
        return int(json.loads(marker.read_text(encoding="utf-8"))["global_step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def ended_by_time(marker: Path) -> bool:
    """Whether a run is finished because the time of ``trainer.max_time`` was over."""
    return finished_step(marker) is not None and json.loads(marker.read_text()).get(ENDED_BY) == MAX_TIME
