"""Where a run's figures go."""

from pathlib import Path

import pytest
import torch
import yaml
from google.protobuf import json_format
from lightning.pytorch import loggers as lightning_loggers
from lightning.pytorch.loggers import Logger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from tensorboard.summary.writer import event_file_writer

from lit_ft.run.folder import RunFolder
from lit_ft.training.loggers import LitLogger, MetricsCSV, StepEvents, beside_defaults


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


def test_options_are_on_tensorboards_page_of_hyperparameters(tmp_path: Path) -> None:
    logger = StepEvents(tmp_path, name="", version="")
    options = {"model": {"peft": {"r": 8, "bias": "none", "rank_pattern": None}}, "devices": [0, 1]}
    logger.log_hyperparams(options)
    logger.log_metrics({"val/loss": 0.5}, 3)
    logger.finalize("success")
    events = EventAccumulator(str(tmp_path)).Reload()
    experiment, session, _ = (
        HParamsPluginData.FromString(events.SummaryMetadata(f"_hparams_/{name}").plugin_data.content)
        for name in ("experiment", "session_start_info", "session_end_info")
    )
    assert [info.name.tag for info in experiment.experiment.metric_infos] == ["val/loss", "train/loss"]
    values = {name: json_format.MessageToDict(value) for name, value in session.session_start_info.hparams.items()}
    assert values == {"model/peft/r": 8, "model/peft/bias": "none", "devices": "[0, 1]"}
    assert [event.value for event in events.Scalars("val/loss")] == [0.5]  # of evaluations, not of the options
    assert yaml.safe_load((tmp_path / "hparams.yaml").read_text()) == options


def test_loggers_of_the_recipe_are_beside_the_defaults(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    mine, csv = LitLogger.__new__(LitLogger), lightning_loggers.CSVLogger(tmp_path)
    same_file = lightning_loggers.CSVLogger(tmp_path, name="", version="")
    assert [type(one) for one in beside_defaults(True, run, 0, True)] == [MetricsCSV, StepEvents]
    assert [type(one) for one in beside_defaults([mine], run, 0, True)] == [MetricsCSV, StepEvents, LitLogger]
    assert [type(one) for one in beside_defaults(csv, run, 0, True)] == [MetricsCSV, StepEvents, type(csv)]
    assert [type(one) for one in beside_defaults(same_file, run, 0, True)] == [StepEvents, type(csv)]


def test_a_resumed_run_says_where_a_logger_begins_a_new_folder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = RunFolder(tmp_path)
    (tmp_path / "mine" / "version_0").mkdir(parents=True)
    with caplog.at_level("INFO"):
        beside_defaults([lightning_loggers.CSVLogger(tmp_path, name="mine")], run, 0, None)
        beside_defaults([lightning_loggers.TensorBoardLogger(tmp_path, name="mine", version="one")], run, 4, None)
        assert not caplog.messages
        beside_defaults([lightning_loggers.CSVLogger(tmp_path, name="mine")], run, 4, None)
    assert caplog.messages == [
        f"trainer.logger: CSVLogger writes into {tmp_path}/mine/version_1 from here on: it begins a folder at each "
        "resumption, and earlier steps are in those beside it"
    ]


@pytest.mark.parametrize(("rows", "is_said"), [((0, 1, 2), True), ((0, 1), False)])
def test_a_resumed_run_says_which_loggers_keep_what_is_logged_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, rows: tuple[int, ...], is_said: bool
) -> None:
    (tmp_path / "metrics.csv").write_text("step,epoch\n" + "".join(f"{row},0\n" for row in rows))
    own: list[Logger] = [LitLogger.__new__(LitLogger), lightning_loggers.TensorBoardLogger(tmp_path, version="one")]
    with caplog.at_level("INFO"):
        beside_defaults(own, RunFolder(tmp_path), 2, None)
    said = "LitLogger: what was logged from step 2 on stays there, beside what is logged again"
    assert caplog.messages == [said] * is_said


def test_tensorboard_shows_what_was_measured_at_the_end_of_a_run_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Files of a second and a process are read by the number of the writer as text: the tenth is before the ninth.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))

    def run(resumed_step: int, rows: list[tuple[int, dict[str, float]]]) -> None:
        loggers = beside_defaults(None, RunFolder(tmp_path), resumed_step, None)
        for logger in loggers:
            for step, metrics in rows:
                logger.log_metrics(metrics, step)
            logger.save()
            logger.finalize("success")

    run(0, [(1, {"epoch": 0, "loss": 1.0}), (2, {"val/exact_match": 0.5})])  # after the second step
    run(2, [(2, {"epoch": 0, "loss": 2.0}), (3, {"epoch": 0, "loss": 3.0})])
    run(3, [(3, {"epoch": 0, "loss": 4.0})])  # step 4 was after the checkpoint
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("val/exact_match")] == [(2, 0.5)]
    assert sorted((event.step, event.value) for event in events.Scalars("loss")) == [(1, 1.0), (2, 2.0), (3, 4.0)]
