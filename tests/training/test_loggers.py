"""Where a run's figures go."""

from pathlib import Path

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from lit_ft.training.loggers import StepEvents


def test_figures_of_a_call_are_one_event(tmp_path: Path) -> None:
    """TensorBoard shows what it shows of figures that are written one by one."""
    logger = StepEvents(tmp_path, name="", version="")
    for step in (0, 10):
        logger.log_metrics({"train/loss": torch.tensor(0.5 + step), "throughput/mfu": 0.25, "steps": 3}, step)
    logger.log_metrics({"losses": {"one": 1.0, "two": 2.0}}, 20)
    logger.finalize("success")
    logger.log_metrics({"after": 1.0}, 30)  # opens another file
    logger.finalize("success")
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(0, 0.5), (10, 10.5)]
    assert [event.value for event in events.Scalars("throughput/mfu")] == [0.25, 0.25]
    assert [event.value for event in events.Scalars("steps")] == [3, 3]
    assert [event.step for event in EventAccumulator(str(tmp_path / "losses_two")).Reload().Scalars("losses")] == [20]
    first = min(tmp_path.glob("events*"), key=lambda path: int(path.suffix[1:]))  # the writer numbers them
    assert [len(event.summary.value) for event in EventFileLoader(str(first)).Load() if event.summary.value] == [3, 3]


def test_a_prefix_is_kept(tmp_path: Path) -> None:
    """As TensorBoardLogger has it."""
    logger = StepEvents(tmp_path, name="", version="", prefix="mine")
    logger.log_metrics({"loss": 1.0}, 0)
    logger.finalize("success")
    assert EventAccumulator(str(tmp_path)).Reload().Tags()["scalars"] == ["mine-loss"]
