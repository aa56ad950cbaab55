"""Whether a run is finished, and what a killed run still has to write."""

import json
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lit_callbacks.export.manifest import write_durably
from lit_callbacks.protocols import WritesAtTheEnd

from lit_ft.checkpointing.selection import SESSION, UNLOGGED, candidates
from lit_ft.run.lock import check_still_there


class RunState(Callback):
    """Number a run's starts and resumptions, mark the run when it is finished, and finish one that was killed late.

    Lightning leaves ``on_train_end`` out where a checkpoint is of the run's last step, so a process that was killed
    between its last checkpoint and the end of its exports would never write them: here they are written.
    """

    def __init__(self, marker: Path, checkpoints: Path) -> None:
        """Say what lies where.

        Args:
            marker: the file that says that the run is finished, and at which step.
            checkpoints: folder of the run's checkpoints.
        """
        self.marker, self.checkpoints = marker, checkpoints
        self._session = 1
        self._finished_step: int | None = None
        self._unlogged: dict[str, float] | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Read how far earlier processes came; from here on the run is not finished."""
        if trainer.is_global_zero:
            self._session = 1 + max((found.position.session for found in candidates(self.checkpoints)[0]), default=0)
            self._finished_step = finished_step(self.marker)
            self.marker.unlink(missing_ok=True)
        loop = trainer.fit_loop
        run = loop.run

        def run_or_finish() -> None:
            loop.setup_data()
            is_over = loop.done and trainer.limit_train_batches != 0
            run()
            if is_over:
                self._write_what_is_missing(trainer, pl_module)

        # Lightning calls no hook between restoring a checkpoint and tearing the strategy down where nothing is left to
        # train; after it, split weights can no longer be gathered.
        loop.run = run_or_finish  # type: ignore[method-assign]

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Number the checkpoint by the start or resumption that wrote it; keep the metrics that are logged after it."""
        self._check_folder(trainer)
        checkpoint[SESSION] = self._session
        if (metrics := _metrics_about_to_be_logged(trainer)) is not None:
            checkpoint[UNLOGGED] = metrics

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Take up what the earlier process may have been killed before logging."""
        self._unlogged = checkpoint.get(UNLOGGED)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log it, at the step of the checkpoint."""
        self._log_what_was_not(trainer)

    def _log_what_was_not(self, trainer: Trainer) -> None:
        metrics, self._unlogged = self._unlogged, None
        for logger in trainer.loggers if metrics else []:
            logger.log_metrics(dict(metrics or {}), step=trainer.global_step - 1)
            logger.save()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """See that the folder is there, before the adapter and the merged model are written to it."""
        self._check_folder(trainer)

    def _check_folder(self, trainer: Trainer) -> None:
        # A checkpoint's folder is made where it is missing: the run would end well without what it wrote before.
        if trainer.is_global_zero:
            check_still_there(self.marker.parent)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Mark the run as finished."""
        if trainer.is_global_zero:
            write_durably(self.marker, json.dumps({"global_step": trainer.global_step}) + "\n")

    def _write_what_is_missing(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._log_what_was_not(trainer)
        _finish_validation(trainer)
        is_newer = trainer.strategy.broadcast(self._finished_step) != trainer.global_step
        rank_zero_info(f"the run was at its last step, {trainer.global_step:,}, already: nothing is left to train")
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, WritesAtTheEnd):
                callback.write_final(trainer, pl_module, only_missing=not is_newer)


def _finish_validation(trainer: Trainer) -> None:
    """Run the validation that was due after the last step, where no checkpoint was written after it.

    Lightning validates again where a run ends by ``max_epochs``, and nothing where it ends by ``max_steps``.
    """
    loop = trainer.fit_loop.epoch_loop
    validated = loop.val_loop.batch_progress.current
    if validated.ready == validated.completed or not trainer.enable_validation:
        return
    rank_zero_info("the validation after the last step did not come to its end: it runs again")
    trainer.validating = True
    loop.val_loop.run()
    trainer.training = True


def _metrics_about_to_be_logged(trainer: Trainer) -> dict[str, float] | None:
    """Metrics of a step whose checkpoint is written between its end and Lightning's logging of them; None elsewhere.

    Lightning logs a step after ``on_train_batch_end``, where most checkpoints are written, and has no public way to
    what it is about to log.
    """
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    if not trainer.training or progress.processed == progress.completed or trainer.fit_loop._should_accumulate():
        return None
    connector = trainer._logger_connector
    metrics = connector.metrics["log"]
    if not connector.should_update_logs:
        return {}
    return {"epoch": float(trainer.current_epoch), **{name: float(value) for name, value in metrics.items()}}


def finished_step(marker: Path) -> int | None:
    """The step that a run was finished at; None of one that is not finished."""
    try:
        return int(json.loads(marker.read_text(encoding="utf-8"))["global_step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
