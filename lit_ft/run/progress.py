"""Progress of a run: steps, time left and metrics, as a bar on a terminal and as lines elsewhere."""

import logging
import math
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TextIO

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.utilities.types import STEP_OUTPUT
from lit_callbacks.output.quantities import as_number, as_time
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Column
from rich.text import Text
from torch import Tensor

from lit_ft.accumulation import optimizer_steps
from lit_ft.run.time_limit import time_left


class StepTimes:
    """Time that is left, from the steps that this process has taken and their time, validation included.

    Where ``trainer.max_time`` leaves less, it is that.
    """

    def __init__(self, first_step: int, steps: float, limit: Callable[[], float | None] = lambda: None) -> None:
        """Begin to count.

        Args:
            first_step: optimizer steps that were taken before.
            steps: optimizer steps of the run; infinite or below 0 if time ends it.
            limit: gives the seconds until time ends the run; None if it does not.
        """
        self.first_step, self._began, self._limit = first_step, time.perf_counter(), limit
        self.steps = steps if steps >= 0 else math.inf

    @classmethod
    def of(cls, trainer: Trainer) -> "StepTimes":
        """Begin to count at the step of a trainer that begins to train."""
        return cls(trainer.global_step, optimizer_steps(trainer), partial(time_left, trainer))

    def seconds(self) -> float:
        """Seconds since the beginning."""
        return time.perf_counter() - self._began

    def describe(self, step: int) -> str:
        """Text with the step, the run's number of steps and the time left, e.g. ``step 30 of 90, 2 min 5 s left``."""
        of_all = "" if math.isinf(self.steps) else f" of {int(self.steps):,}"
        return f"step {step:,}{of_all}{self.describe_left(step)}"

    def describe_left(self, step: int) -> str:
        """Text with the time left after a comma; empty before the first step and after the last one."""
        done, limit = step - self.first_step, self._limit()
        if done < 1 or step >= self.steps:
            return ""
        left = min(self.seconds() / done * (self.steps - step), math.inf if limit is None else limit)
        return "" if math.isinf(left) else f", {as_time(max(0.0, left))} left"


def describe_metrics(metrics: Mapping[str, float | Tensor | str], stage: str) -> str:
    """Text with the metrics of a stage, e.g. its loss; for ``train`` also what is measured of its steps.

    The trainer keeps the last value of every metric: those of the last validation are not those of a later step.

    Args:
        metrics: metrics of the progress bar.
        stage: train or val.
    """
    return ", ".join(f"{name} {as_number(value)}" for name, value in _of_stage(metrics, stage).items())


FIRST_ON_BAR = {"train/loss": ("loss ", ""), "throughput/tokens_per_second": ("", " tokens/s")}
"""Metrics that a bar shows first, and the text around their values: 80 characters have room for these."""


def describe_step(metrics: Mapping[str, float | Tensor | str]) -> str:
    """Text with the metrics of a step for a bar, e.g. ``loss 0.1554, 1,218 tokens/s, train/learning_rate 0.003``.

    Args:
        metrics: metrics of the progress bar.
    """
    shown = sorted(_of_stage(metrics, "train").items(), key=lambda metric: metric[0] not in FIRST_ON_BAR)
    parts = [(*FIRST_ON_BAR.get(name, (f"{name} ", "")), as_number(value)) for name, value in shown]
    return ", ".join(f"{before}{value}{after}" for before, after, value in parts)


def _of_stage(metrics: Mapping[str, float | Tensor | str], stage: str) -> dict[str, float]:
    """Numbers of a stage; for ``train`` those of no stage too."""
    return {
        name: float(value)
        for name, value in metrics.items()
        if not isinstance(value, str)
        and (name.startswith(f"{stage}/") if stage == "val" else not name.startswith(("val", "test")))
    }


def _move_log_lines(before: TextIO, now: TextIO) -> list["logging.StreamHandler[TextIO]"]:
    """Let handlers of log lines that write to one stream write to another; returns them.

    rich replaces ``sys.stderr`` by one that prints above the bar, but handlers keep the stream that they began with.
    """
    if before is now:
        return []
    loggers = [
        logging.root,
        *(one for one in logging.root.manager.loggerDict.values() if isinstance(one, logging.Logger)),
    ]
    handlers = [handler for logger in loggers for handler in logger.handlers]
    moved = [one for one in handlers if isinstance(one, logging.StreamHandler) and one.stream is before]
    for handler in moved:
        handler.setStream(now)
    return moved


BAR_WIDTH = 10
"""Characters of the bar: on a terminal of 80 they leave room for the time left, the loss and the speed."""


class _NoteColumn(ProgressColumn):
    """Time left and metrics. In a narrow terminal rich cuts columns that may wrap first, and this is the only one."""

    def render(self, task: Task) -> Text:
        return Text(task.fields["note"], no_wrap=True, overflow="ellipsis")


class RunProgressBar(ProgressBar):
    """Bar over the optimizer steps of the whole run; in validation, test and predict, over their batches."""

    def __init__(self, console: Console | None = None) -> None:
        """Set the console.

        Args:
            console: console to draw on; None is stdout.
        """
        super().__init__()
        self._console = console
        self._bar: Progress | None = None
        self._enabled = True
        self._moved: list[logging.StreamHandler[TextIO]] = []
        self._steps: TaskID | None = None
        self._batches: TaskID | None = None
        self._times: StepTimes | None = None

    def enable(self) -> None:
        """Show the bar."""
        self._enabled = True

    def disable(self) -> None:
        """Hide the bar, on ranks other than the first."""
        self._enabled = False

    def _add(self, what: str, total: float, completed: int = 0) -> TaskID:
        if self._bar is None:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(BAR_WIDTH, table_column=Column(no_wrap=True)),
                MofNCompleteColumn(table_column=Column(no_wrap=True)),
                TimeElapsedColumn(table_column=Column(no_wrap=True)),
                _NoteColumn(),
                console=self._console,
                disable=not self._enabled,
                redirect_stderr=sys.stderr.isatty(),  # else lines meant for a file would go to the terminal
            )
            before = sys.stderr
            self._bar.start()
            self._moved = _move_log_lines(before, sys.stderr)
        total_or_none = None if math.isinf(total) else total
        return self._bar.add_task(what, total=total_or_none, completed=completed, note="")

    def _close(self) -> None:
        if self._bar is not None:
            drawn_over = sys.stderr
            self._bar.stop()
            for handler in self._moved:
                if handler.stream is drawn_over:
                    handler.setStream(sys.stderr)
        self._bar = self._steps = self._batches = None

    # --- training --------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw the bar of the run; a resumed one begins where it was."""
        self._times = StepTimes.of(trainer)
        self._steps = self._add("steps", self._times.steps, trainer.global_step)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: object, batch_idx: int
    ) -> None:
        """Show the step, the time left, and the metrics of the step."""
        if self._bar is not None and self._steps is not None and self._times is not None:
            step = trainer.global_step
            metrics = describe_step(self.get_metrics(trainer, pl_module))  # type: ignore[arg-type]
            left = self._times.describe_left(step).removeprefix(", ")
            self._bar.update(self._steps, completed=step, note="  ".join(filter(None, (left, metrics))))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the finished bar on the terminal."""
        self._close()

    # --- evaluation ------------------------------------------------------------------------------

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw the bar of the batches."""
        batches = trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches
        self._batches = self._add("validation", sum(batches))

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw the bar of the batches."""
        self._batches = self._add("test", sum(trainer.num_test_batches))

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw the bar of the batches."""
        self._batches = self._add("answers", sum(trainer.num_predict_batches))

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: object,
        batch: object,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Count the batch."""
        if self._bar is not None and self._batches is not None:
            self._bar.advance(self._batches)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remove the bar of the batches."""
        if self._bar is not None and self._batches is not None:
            self._bar.remove_task(self._batches)
        self._batches = None
        if self._steps is None:
            self._close()

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end
    on_test_end = on_predict_end = on_validation_end

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Give the terminal back."""
        self._close()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Give the terminal back."""
        self._close()
