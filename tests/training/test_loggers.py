"""Where a run's figures go."""

from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from google.protobuf import json_format
from jsonargparse import Namespace
from lightning.pytorch import loggers as lightning_loggers
from lightning.pytorch.loggers import MLFlowLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from lit_ft.errors import RecipeError
from lit_ft.run.folder import RunFolder
from lit_ft.training.loggers import LitLogger, MetricsCSV, StepEvents, beside_defaults, log_recipe, placed


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


def parsed(name: str, **arguments: object) -> Namespace:
    """An option as jsonargparse parses it, with the defaults of the class."""
    cls = getattr(lightning_loggers, name)
    defaults = {key: p.default for key, p in signature(cls).parameters.items() if p.kind is not p.VAR_KEYWORD}
    class_path = f"lightning.pytorch.loggers.{name}"
    return Namespace(class_path=class_path, init_args=Namespace(**{**defaults, **arguments}))


def all_placed(run: Path, loggers: list[Any]) -> list[Any]:
    found = placed(run, loggers)
    assert isinstance(found, list)
    return found


def test_loggers_write_into_the_run_folder_unless_the_recipe_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "qwen" / "2026-11-23_10-00-00"
    given: Any = [parsed("WandbLogger"), parsed("MLFlowLogger"), parsed("CometLogger")]
    wandb, mlflow, comet = all_placed(run, given)
    assert [given[0].init_args.id, given[1].init_args.tracking_uri, given[2].get("dict_kwargs")] == [None, None, None]
    assert wandb.init_args.save_dir == str(run)
    assert (wandb.init_args.id, wandb.dict_kwargs) == ("qwen-2026-11-23_10-00-00", {"resume": "allow"})
    assert mlflow.init_args.tracking_uri == f"sqlite:///{run}/mlflow.db"
    assert (mlflow.init_args.run_name, mlflow.init_args.run_id) == ("qwen/2026-11-23_10-00-00", None)
    assert comet.dict_kwargs == {"offline_directory": str(run / "comet")}
    chosen = parsed("WandbLogger", save_dir="/data", id="mine"), parsed("MLFlowLogger", tracking_uri="http://host:5000")
    chosen = all_placed(run, list(chosen))
    assert (chosen[0].init_args.save_dir, chosen[0].init_args.id) == ("/data", "mine")
    assert chosen[1].init_args.tracking_uri == "http://host:5000"
    for nothing in (None, True, False, []):
        assert placed(run, nothing) == nothing


class SwanLabLogger:
    """Signature of the one of swanlab, which is not installed here."""

    def __init__(
        self,
        experiment_name: str | None = None,
        log_dir: str | None = None,
        save_dir: str = ".",
        id: str | None = None,
        **options: object,
    ) -> None: ...


def test_swanlab_writes_into_the_run_folder_and_goes_on_in_its_experiment(tmp_path: Path) -> None:
    options: dict[str, object] = {"experiment_name": None, "log_dir": None, "save_dir": ".", "id": None}
    run = tmp_path / "qwen" / "2026-11-23_10-00-00"
    path = f"{SwanLabLogger.__module__}.SwanLabLogger"
    (found,) = all_placed(run, [Namespace(class_path=path, init_args=Namespace(**options))])
    name = {"experiment_name": "qwen/2026-11-23_10-00-00", "id": "qwen-2026-11-23_10-00-00"}
    assert found.init_args == Namespace(**name, log_dir=str(run / "swanlog"), save_dir=str(run))
    assert found.dict_kwargs == {"resume": "allow"}
    mine = options | {"id": "mine", "experiment_name": "first", "log_dir": "/data"}
    (found,) = all_placed(run, [Namespace(class_path=path, init_args=Namespace(**mine))])
    assert found.init_args == Namespace(**{**mine, "save_dir": str(run)})
    assert "dict_kwargs" not in found


class Tracked(MLFlowLogger):
    """Logger of a run in MLflow, which is not installed here; its client is the logger itself."""

    def __init__(self, tracking_uri: str, run_id: str) -> None:
        self.tracking_uri, self._own_id = tracking_uri, run_id
        self.told: list[Any] = []

    run_id = property(lambda self: self._own_id)
    experiment = property(lambda self: self)

    def update_run(self, run_id: str, status: str) -> None:
        self.told.append((run_id, status))

    def log_hyperparams(self, params: Any) -> None:
        self.told.append(params)


def test_a_resumed_run_goes_on_in_its_run_of_mlflow(tmp_path: Path) -> None:
    own, host = f"sqlite:///{tmp_path}/run/mlflow.db", "http://host:5000"
    run, moved = tmp_path / "run", tmp_path / "moved"
    run.mkdir()
    for told in ([[{"lr": 0.1}], [{"lr": 0.1}]], [[("one", "RUNNING")], [("two", "RUNNING")]]):
        loggers = [Tracked(own, "one"), Tracked(host, "two")]
        log_recipe(loggers, {"lr": 0.1}, run)
        assert [one.told for one in loggers] == told
    run.rename(moved)
    for uri, run_id in ((None, "one"), (host, "two"), ("http://other:5000", None)):
        (mlflow,) = all_placed(moved, [parsed("MLFlowLogger", tracking_uri=uri)])
        assert mlflow.init_args.run_id == run_id


def test_comet_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RecipeError, match="CometLogger logs nothing; leave it out, and set COMET_START_ONLINE=0 in"):
        placed(tmp_path / "run", parsed("CometLogger", online=False))
    placed(tmp_path / "run", parsed("CometLogger"))
    assert not (tmp_path / "run").exists()
    monkeypatch.setenv("COMET_START_ONLINE", "0")
    placed(tmp_path / "run", parsed("CometLogger"))
    assert (tmp_path / "run" / "comet").is_dir()


def test_lit_logger_without_a_login(monkeypatch: pytest.MonkeyPatch) -> None:
    def log_in(_: object) -> None:
        raise ConnectionError("No internet connection available")

    monkeypatch.setattr(lightning_loggers.LitLogger, "experiment", property(log_in))
    with pytest.raises(RecipeError, match="LitLogger: ConnectionError: No internet .*; run `lightning login` once"):
        _ = LitLogger.__new__(LitLogger).experiment


def test_loggers_of_the_recipe_are_beside_the_defaults(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    mine, csv = LitLogger.__new__(LitLogger), lightning_loggers.CSVLogger(tmp_path)
    assert [type(one) for one in beside_defaults(True, run, 0, True)] == [MetricsCSV, StepEvents]
    assert [type(one) for one in beside_defaults([mine], run, 0, True)] == [MetricsCSV, StepEvents, LitLogger]
    assert [type(one) for one in beside_defaults(csv, run, 0, True)] == [StepEvents, type(csv)]


def test_tensorboard_shows_what_was_measured_at_the_end_of_a_run_that_goes_on(tmp_path: Path) -> None:
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
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 1.0), (2, 2.0), (3, 4.0)]
