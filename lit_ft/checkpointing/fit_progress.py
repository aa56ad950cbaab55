"""Progress counters of a Lightning checkpoint, corrected so that a resumed run equals the uninterrupted one.

A checkpoint may be written in the middle of an optimizer step: after a validation, by time, on an exception. Its
weights are those after the last full step, and it does not hold the gradient accumulated since. The run therefore goes
back to the first micro-batch of the step, and computes that gradient again from the same samples and random numbers.
"""

from typing import TypedDict

from lit_ft.protocols import Checkpoint, LoaderState

Counts = dict[str, int]


class BatchCounts(TypedDict):
    """State of Lightning's progress of batches."""

    total: Counts
    """Batches of all epochs, by how far they came: ready, started, processed, completed."""
    current: Counts
    """Batches of the running epoch."""
    is_last_batch: bool


class FitProgress:
    """Counters of the fit loop; changes are made in place in the checkpoint."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Find the counters, by the keys of Lightning's ``_FitLoop.state_dict``."""
        loops = checkpoint["loops"]["fit_loop"]
        self._epochs: dict[str, Counts] = loops["epoch_progress"]
        self._batches: BatchCounts = loops["epoch_loop.batch_progress"]
        self._logging: Counts = loops["epoch_loop.state_dict"]
        self._validation: BatchCounts = loops["epoch_loop.val_loop.batch_progress"]
        if not self.validation_was_interrupted:  # a restarted validation has counted one begun batch too many
            self._validation["total"] |= dict.fromkeys(
                self._validation["total"], self._validation["total"]["completed"]
            )
        self.loader_states: list[LoaderState] = loops["state_dict"].get("combined_loader", [])
        """Saved state of each training loader."""

    @property
    def epoch(self) -> int:
        """Index of the epoch in which the run continues, from 0."""
        return self._epochs["current"]["processed"]

    @property
    def ready(self) -> int:
        """Number of micro-batches of the epoch that were started."""
        return self._batches["current"]["ready"]

    @property
    def trained(self) -> int:
        """Number of micro-batches of the epoch whose training was completed."""
        return self._batches["current"]["processed"]

    @property
    def trained_in_all(self) -> int:
        """Number of micro-batches of all epochs whose training was completed."""
        return self._batches["total"]["processed"]

    @property
    def was_saved_before_validation(self) -> bool:
        """Whether the checkpoint was saved right after a micro-batch, when a validation may be due but has not run."""
        return self._batches["current"]["completed"] < self.trained

    @property
    def epoch_is_over(self) -> bool:
        """Whether the epoch's last micro-batch was trained on."""
        return self._batches["is_last_batch"] and self.trained == self.ready

    @property
    def validation_was_interrupted(self) -> bool:
        """Whether the checkpoint was saved between two batches of a validation."""
        current = self._validation["current"]
        is_whole = self._validation["is_last_batch"] and current["completed"] == current["ready"]
        return current["ready"] > 0 and not is_whole

    def reopen_epoch(self) -> bool:
        """Continue an epoch that ended before its last micro-batch, by a limit on steps or time, or by early stopping.

        Returns:
            Whether the epoch was reopened.
        """
        current = self._epochs["current"]
        if self._batches["is_last_batch"] or not self.ready or current["processed"] < current["ready"]:
            return False
        for counts in self._epochs.values():
            counts["processed"] -= 1
            counts["completed"] = min(counts["completed"], counts["processed"])
        return True

    @property
    def epoch_is_to_be_ended(self) -> bool:
        """Whether the end-of-epoch hooks have not run yet, after a validation at the epoch's last micro-batch."""
        return not self.epoch_has_ended and not self.was_saved_before_validation

    @property
    def epoch_has_ended(self) -> bool:
        """Whether the end-of-epoch hooks of the last epoch have begun."""
        current = self._epochs["current"]
        return current["processed"] == current["ready"]

    def finish_epoch(self) -> None:
        """Continue with the next epoch; Lightning would count some finished epochs twice, without training in them."""
        if self.was_saved_before_validation:
            self._logging["_batches_that_stepped"] += 1  # counted after the hook in which the checkpoint was saved
        for counts in self._epochs.values():
            counts |= dict.fromkeys(counts, counts["ready"])
        total = self._batches["total"]
        total |= dict.fromkeys(total, total["ready"])
        self._batches["current"] |= dict.fromkeys(self._batches["current"], 0)
        self._batches["is_last_batch"] = False

    def rewind(self, micro_batch: int) -> None:
        """Continue with an earlier micro-batch of the epoch, as if the checkpoint had been saved right before it."""
        before = self._batches["total"]["ready"] - self.ready
        for counts, done in ((self._batches["current"], micro_batch), (self._batches["total"], before + micro_batch)):
            counts |= dict.fromkeys(counts, done)
        self._batches["is_last_batch"] = False
        if self.validation_was_interrupted:  # it will run again when it is due
            total = self._validation["total"]["completed"] - self._validation["current"]["completed"]
            self._validation["total"] |= dict.fromkeys(self._validation["total"], total)
            self._validation["current"] |= dict.fromkeys(self._validation["current"], 0)

    def restart_validation(self) -> None:
        """Validate first, on the full validation set, because a checkpoint holds no sums over some of its batches."""
        for counts in (self._batches["current"], self._batches["total"]):
            counts["completed"] = counts["processed"]
        total = self._validation["total"]["completed"] - self._validation["current"]["completed"]
        # Lightning treats these counts as a validation that was interrupted in its first batch.
        for counts, done in ((self._validation["current"], 0), (self._validation["total"], total)):
            counts |= {"ready": done + 1, "started": done + 1, "processed": done, "completed": done}

    def recount(self, micro_batches: int) -> None:
        """Set the epoch's progress to a number of micro-batches of this run, whose number of samples may differ."""
        current, ready = self._batches["current"], self.ready
        # Counts of the running batch may be one behind, from which Lightning knows where the run was stopped.
        current |= {name: micro_batches - (ready - count) for name, count in current.items()}
