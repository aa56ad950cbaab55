"""Resumption of a fit at the start of an optimizer step, wherever its checkpoint was written."""

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lit_ft.accumulation import accumulation
from lit_ft.checkpointing.fit_progress import FitProgress
from lit_ft.errors import RecipeError
from lit_ft.internals.lightning import set_logged_steps, validation_interval
from lit_ft.process import datamodule_of
from lit_ft.protocols import Checkpoint, ChecksOrder, LoaderState, RecountsMicroBatches, RewindsPosition


class Replay:
    """Repeated training on micro-batches, without the validations that the stopped run has done between them."""

    def __init__(self, trainer: Trainer, until: int) -> None:
        """Switch validation off.

        Args:
            trainer: trainer of the resumed run.
            until: number of micro-batches of the epoch up to which the stopped run has done all validations.
        """
        self.until = until
        self._limit_val_batches = trainer.limit_val_batches
        trainer.limit_val_batches = 0

    def stop(self, trainer: Trainer) -> None:
        """Switch validation on again."""
        trainer.limit_val_batches = self._limit_val_batches


def go_back_to_a_step(checkpoint: Checkpoint, trainer: Trainer) -> Replay | None:
    """Set a checkpoint back, in place, to the start of the optimizer step in which it was written.

    A data module may implement the protocols ``RewindsPosition``, ``ChecksOrder`` and ``RecountsMicroBatches``.

    Returns:
        Replay of the micro-batches that are trained on again; None if there are none.

    Raises:
        RecipeError: the run has trained more epochs than it is to have.
    """
    data = datamodule_of(trainer)
    progress = FitProgress(checkpoint)
    state = checkpoint.get(type(data).__qualname__) or {}
    reopened = not state.get("is_over") and progress.reopen_epoch()
    replay = None
    if isinstance(data, ChecksOrder) and data.check_order(state):
        replay = _restart_epoch(progress, trainer, data, state)
    elif not progress.epoch_is_over:
        replay = _rewind(checkpoint, progress, trainer, state, reopened)
    if replay is None and (progress.validation_was_interrupted or _validation_is_due(progress, trainer, state)):
        progress.restart_validation()
        _validate_where_training_is_over(trainer)
    before = progress.ready
    if isinstance(data, RecountsMicroBatches):
        data.rescale_progress(checkpoint)
    if replay is not None and progress.ready != before:
        replay.until = progress.ready  # micro-batches have changed, so the stopped run's count no longer applies
    if progress.epoch_is_over and not progress.epoch_is_to_be_ended:
        progress.finish_epoch()
        replay = Replay(trainer, 0)
    if trainer.max_epochs is not None and 0 <= trainer.max_epochs < progress.epoch:
        raise RecipeError(
            f"trainer.max_epochs={trainer.max_epochs} is less than the {progress.epoch} epochs after which the "
            "checkpoint was written; raise it, or resume from an earlier checkpoint"
        )
    return replay


def number_logged_steps(trainer: Trainer) -> None:
    """Set the number under which Lightning logs the current step to the number of completed steps.

    Lightning counts logged steps separately from ``global_step``, and after a second resumption the count is sometimes
    one too low: two steps are then logged under one number.
    """
    set_logged_steps(trainer, trainer.global_step)


def _validate_where_training_is_over(trainer: Trainer) -> None:
    """Run the validation that is due also if the checkpoint is of the run's last optimizer step.

    Lightning repeats it where a run ends by ``max_epochs``, but not where it ends by ``max_steps``: then it calls no
    hook between restoring the checkpoint and tearing down the strategy.
    """
    loop = trainer.fit_loop
    run = loop.run

    def validate_and_run() -> None:
        loop.run = run  # type: ignore[method-assign]
        loop.setup_data()
        if loop.done and trainer.limit_train_batches != 0 and trainer.enable_validation:
            rank_zero_info("the validation after the last step did not come to its end: it runs again")
            trainer.validating = True
            loop.epoch_loop.val_loop.run()
            trainer.training = True
        run()

    loop.run = validate_and_run  # type: ignore[method-assign]


def _rewind(
    checkpoint: Checkpoint, progress: FitProgress, trainer: Trainer, state: LoaderState, reopened: bool
) -> Replay | None:
    data = datamodule_of(trainer)
    accumulate = state.get("deal", {}).get("accumulate") or accumulation(trainer, progress.epoch)
    trained, ready = progress.trained, progress.ready
    start = trained // accumulate * accumulate
    if isinstance(data, RewindsPosition):
        for saved in (state, *progress.loader_states):
            if saved:
                data.rewind(saved, start, ready)
    elif start < trained:
        rank_zero_warn(
            f"the checkpoint was written {trained - start} micro-batches into an optimizer step of {accumulate}, and "
            f"their gradient is lost: {type(data).__name__} cannot go back to the step's beginning, as a data module "
            "with a method rewind(state, micro_batch, ready) can (lit_ft.TextDataModule); resume from a checkpoint "
            "written between two steps, e.g. at the end of an epoch"
        )
        return None
    if start == ready and not reopened:
        return None
    to_validate = progress.validation_was_interrupted or progress.was_saved_before_validation
    until = max(trained - 1 if to_validate else trained, start, checkpoint.get("validated_until", 0))
    progress.rewind(start)
    return Replay(trainer, until)


def _restart_epoch(progress: FitProgress, trainer: Trainer, data: ChecksOrder, state: LoaderState) -> Replay | None:
    for saved in (state, *progress.loader_states):
        data.restart_epoch(saved)
    if progress.epoch_is_over:
        return None
    progress.rewind(0)
    return Replay(trainer, 0)


def _validation_is_due(progress: FitProgress, trainer: Trainer, state: LoaderState) -> bool:
    """Whether the stopped run would have validated next; Lightning would continue without validation."""
    every, interval = trainer.check_val_every_n_epoch, validation_interval(trainer)
    if not progress.was_saved_before_validation or not trainer.enable_validation:
        return False
    if (every is not None and (progress.epoch + 1) % every) or interval is None:
        return False
    if isinstance(interval, float):
        if interval == 1.0 or state.get("batches") is None:
            return interval == 1.0 and progress.epoch_is_over
        interval = max(1, int(state["batches"] * interval))
    return (progress.trained_in_all if every is None else progress.trained) % interval == 0
