"""The progress of a fit in a Lightning checkpoint, corrected so that the resumed run equals the uninterrupted one.

A checkpoint may be written within an optimizer step: after a validation, by time, on an exception. Its weights are
those of the last step, and the gradient since then is in no checkpoint. So the run goes back to the micro-batch that
the step began with, and computes that gradient again: from the same samples, with the same draws.
"""

from typing import Any

Counts = dict[str, int]


class FitProgress:
    """Counts of the fit loop; every change is made in the checkpoint."""

    def __init__(self, checkpoint: dict[str, Any]) -> None:
        """Find the counts; the names are those of Lightning's ``_FitLoop.state_dict``."""
        loops = checkpoint["loops"]["fit_loop"]
        self._epochs: dict[str, Counts] = loops["epoch_progress"]
        self._batches: dict[str, Any] = loops["epoch_loop.batch_progress"]
        self._logging: Counts = loops["epoch_loop.state_dict"]
        self._validation: dict[str, Any] = loops["epoch_loop.val_loop.batch_progress"]
        if not self.validation_was_interrupted:  # one that was restarted has left its total of begun batches one ahead
            self._validation["total"] |= dict.fromkeys(
                self._validation["total"], self._validation["total"]["completed"]
            )
        self.loader_states: list[dict[str, Any]] = loops["state_dict"].get("combined_loader", [])
        """What each training loader has saved of its place."""

    @property
    def epoch(self) -> int:
        """The epoch that the run goes on in, counted from 0."""
        return self._epochs["current"]["processed"]

    @property
    def ready(self) -> int:
        """Micro-batches of the epoch that were begun."""
        return self._batches["current"]["ready"]

    @property
    def trained(self) -> int:
        """Micro-batches of the epoch that were trained on to the end."""
        return self._batches["current"]["processed"]

    @property
    def trained_in_all(self) -> int:
        """The same over all epochs."""
        return self._batches["total"]["processed"]

    @property
    def was_saved_before_validation(self) -> bool:
        """Whether it was saved right after a micro-batch, where a validation may be due that has not run."""
        return self._batches["current"]["completed"] < self.trained

    @property
    def epoch_is_over(self) -> bool:
        """Whether the epoch's last micro-batch was trained on."""
        return self._batches["is_last_batch"] and self.trained == self.ready

    @property
    def validation_was_interrupted(self) -> bool:
        """Whether it was saved between two batches of a validation."""
        current = self._validation["current"]
        is_whole = self._validation["is_last_batch"] and current["completed"] == current["ready"]
        return current["ready"] > 0 and not is_whole

    def reopen_epoch(self) -> bool:
        """Go on within an epoch that was ended before its last micro-batch, by a limit on steps or time, or early.

        Returns:
            Whether there was one.
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
        """Whether what comes at an epoch's end is still to come, after a validation at its last micro-batch."""
        current = self._epochs["current"]
        return current["processed"] < current["ready"] and not self.was_saved_before_validation

    def finish_epoch(self) -> None:
        """Go on with the next epoch; Lightning counts some that are over twice, and trains on none of their batches."""
        if self.was_saved_before_validation:
            self._logging["_batches_that_stepped"] += 1  # counted after the hook that it was saved in
        for counts in self._epochs.values():
            counts |= dict.fromkeys(counts, counts["ready"])
        total = self._batches["total"]
        total |= dict.fromkeys(total, total["ready"])
        self._batches["current"] |= dict.fromkeys(self._batches["current"], 0)
        self._batches["is_last_batch"] = False

    def rewind(self, micro_batch: int) -> None:
        """Go on with an earlier micro-batch of the epoch, as if it had been saved right before."""
        before = self._batches["total"]["ready"] - self.ready
        for name, done in (("current", micro_batch), ("total", before + micro_batch)):
            self._batches[name] |= dict.fromkeys(self._batches[name], done)
        self._batches["is_last_batch"] = False
        if self.validation_was_interrupted:  # it runs again where it was due
            total = self._validation["total"]["completed"] - self._validation["current"]["completed"]
            self._validation["total"] |= dict.fromkeys(self._validation["total"], total)
            self._validation["current"] |= dict.fromkeys(self._validation["current"], 0)

    def restart_validation(self) -> None:
        """Validate before anything else, on the whole set: sums over some of its batches are in no checkpoint."""
        for counts in (self._batches["current"], self._batches["total"]):
            counts["completed"] = counts["processed"]
        total = self._validation["total"]["completed"] - self._validation["current"]["completed"]
        # What Lightning takes for a validation that was interrupted in its first batch.
        for name, done in (("current", 0), ("total", total)):
            self._validation[name] |= {"ready": done + 1, "started": done + 1, "processed": done, "completed": done}

    def recount(self, micro_batches: int) -> None:
        """Count the epoch's micro-batches in others, of another number of samples."""
        current, ready = self._batches["current"], self.ready
        # Counts of the batch that was running may be one behind: Lightning knows by that where it was stopped.
        current |= {name: micro_batches - (ready - count) for name, count in current.items()}
