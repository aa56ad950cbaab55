"""Progress: the whole run's steps and time left, on a terminal and in lines; no metric of an earlier validation."""

import io
import logging
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from rich.console import Console
from shared_fixtures import silent_trainer
from torch.utils.data import DataLoader

from lit_ft.run.folder import RunFolder
from lit_ft.run.progress import RunProgressBar, StepTimes, describe_step
from lit_ft.run.time_limit import time_left
from lit_ft.training import console


class Logs(LightningModule):
    """One weight; logs a loss for each stage."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.layer(batch).mean()
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val/loss", self.layer(batch).mean(), prog_bar=True)

    def predict_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return batch

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


BATCHES = DataLoader(torch.ones(6, 1))
SCHEDULE = {"max_epochs": 2, "accumulate_grad_batches": 2, "num_sanity_val_steps": 1, "log_every_n_steps": 1}


def test_time_left_counts_the_steps_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([100.0, 130.0])
    monkeypatch.setattr("lit_ft.run.progress.time.perf_counter", lambda: next(now))
    times = StepTimes(50, 100)
    assert times.describe(50) == "step 50 of 100"
    assert times.describe(60) == "step 60 of 100, 2 min left"
    assert times.describe(100) == "step 100 of 100"
    monkeypatch.undo()
    assert StepTimes(0, -1).describe(1_500) == "step 1,500"


def test_time_left_is_at_most_that_of_max_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([100.0, 130.0, 130.0])
    monkeypatch.setattr("lit_ft.run.progress.time.perf_counter", lambda: next(now))
    times = StepTimes(50, 100, partial(time_left, silent_trainer(max_time={"seconds": 90})))
    assert times.describe(60) == "step 60 of 100, 1 min 30 s left"
    assert times.describe(95) == "step 95 of 100, 3 s left"
    monkeypatch.undo()
    assert StepTimes(0, -1, partial(time_left, silent_trainer(max_time={"hours": 2}))).describe(7) == "step 7, 2 h left"


@pytest.mark.parametrize("seconds", [0, 30])
def test_lines_without_a_terminal(
    make_trainer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, seconds: int
) -> None:
    monkeypatch.setattr(console, "SECONDS_BETWEEN_LINES", seconds)
    caplog.set_level(logging.INFO)
    trainer = make_trainer(callbacks=[console.ConsoleSummary(RunFolder(tmp_path))], **SCHEDULE)
    trainer.fit(Logs(), BATCHES, BATCHES)
    lines = [message for message in caplog.messages if message.startswith("step ")]
    trained = [line for line in lines if "train/loss" in line]
    assert [re.match(r"step (\d) of 6", line)[1] for line in dict.fromkeys(trained)][-1] == "6"  # type: ignore[index]
    assert len(trained) == (6 if seconds else 12)  # each step, or each micro-batch
    assert all(" left: train/loss" in line for line in trained if line.startswith("step 3 of 6"))
    assert not any("val/loss" in line for line in trained)
    assert [line.split(":")[0].split(",")[0] for line in lines if ": val/loss" in line] == [
        "step 3 of 6",
        "step 6 of 6",
    ]
    assert sum("validation, batch" in line for line in lines) == (0 if seconds else 12)


def test_the_bar_counts_the_steps_of_the_run(make_trainer: Any) -> None:
    screen = io.StringIO()
    bar = RunProgressBar(Console(file=screen, force_terminal=True, width=120))
    trainer = make_trainer(callbacks=[bar], enable_progress_bar=True, **SCHEDULE)
    trainer.fit(Logs(), BATCHES, BATCHES)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
    last = shown.rstrip().splitlines()[-1]
    assert re.search(r"steps .* 6/6 .*loss -?\d", last)
    assert "val/loss" not in last
    trainer.predict(Logs(), BATCHES)
    assert "answers" in screen.getvalue()


@pytest.mark.parametrize("width", [80, 200])
def test_a_narrow_terminal_cuts_the_metrics_and_nothing_else(make_trainer: Any, width: int) -> None:
    class LogsMuch(Logs):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log_dict({f"throughput/quantity_{i}_per_second": 1.5 for i in range(9)}, prog_bar=True)
            return loss

    screen = io.StringIO()
    bar = RunProgressBar(Console(file=screen, force_terminal=True, width=width))
    make_trainer(callbacks=[bar], enable_progress_bar=True, **SCHEDULE).fit(LogsMuch(), BATCHES)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
    lines = [line for line in re.split(r"[\r\n]+", shown) if "loss" in line]
    assert lines
    assert all(re.match(r"steps \S* ?\S* \d/6 \d:\d\d:\d\d .*loss -?\d", line.rstrip()) for line in lines)
    assert all(len(line.rstrip()) == width and line.rstrip().endswith("…") for line in lines)


def test_loss_and_speed_are_first_on_the_bar() -> None:
    speed = {"throughput/samples_per_second": 9.5, "throughput/tokens_per_second": 1218.2}
    metrics = {"v_num": "x", "val/loss": 1.0, "train/learning_rate": 0.003, "train/loss": 0.25, **speed}
    assert describe_step(metrics) == (
        "loss 0.25, 1,218 tokens/s, train/learning_rate 0.003, throughput/samples_per_second 9.5"
    )


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_log_lines_are_printed_above_the_bar(make_trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And those for a file stay there."""
    screen, stderr, file = io.StringIO(), Terminal(), io.StringIO()
    monkeypatch.setattr("sys.stderr", stderr)
    logger = logging.getLogger("lines beside a bar")
    to_terminal, to_file = (logging.StreamHandler(stream) for stream in (stderr, file))

    class Says(Logs):
        def on_train_epoch_end(self) -> None:
            logger.warning("an epoch is over")

    try:
        for handler in (to_terminal, to_file):
            logger.addHandler(handler)
        bar = RunProgressBar(Console(file=screen, force_terminal=True, width=120))
        make_trainer(callbacks=[bar], enable_progress_bar=True, **SCHEDULE).fit(Says(), BATCHES)
        assert to_terminal.stream is stderr
    finally:
        for handler in (to_terminal, to_file):
            logger.removeHandler(handler)
    assert screen.getvalue().count("an epoch is over\n") == 2
    assert "an epoch is over" not in stderr.getvalue()
    assert file.getvalue() == "an epoch is over\n" * 2
