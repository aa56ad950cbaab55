"""Loggers of the recipe: where they write, and in which runs on their servers a resumed run goes on."""

import re
import shutil
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from jsonargparse import Namespace
from lightning.pytorch import Trainer
from lightning.pytorch import loggers as lightning_loggers
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CometLogger, CSVLogger, MLFlowLogger

from lit_ft.errors import RecipeError
from lit_ft.training.loggers import LitLogger
from lit_ft.training.recipe_loggers import explained_starts, idle, log_recipe, placed


def parsed(name: str, **arguments: object) -> Namespace:
    """An option as jsonargparse parses it, with the defaults of the class."""
    cls = getattr(lightning_loggers, name)
    defaults = {key: p.default for key, p in signature(cls).parameters.items() if p.kind is not p.VAR_KEYWORD}
    class_path = f"lightning.pytorch.loggers.{name}"
    return Namespace(class_path=class_path, init_args=Namespace(**{**defaults, **arguments}))


def all_placed(run: Path, loggers: list[Any], resumes: bool = False) -> list[Any]:
    found = placed(run, loggers, resumes)
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
    assert re.fullmatch(r"qwen-2026-11-23_10-00-00-[0-9a-f]{8}", wandb.init_args.id)
    assert (wandb.init_args.name, wandb.dict_kwargs) == ("qwen/2026-11-23_10-00-00", {"resume": "allow"})
    assert mlflow.init_args.tracking_uri == f"sqlite:///{run}/mlflow.db"
    assert (mlflow.init_args.run_name, mlflow.init_args.run_id) == ("qwen/2026-11-23_10-00-00", None)
    assert comet.dict_kwargs == {"offline_directory": str(run / "comet"), "name": "qwen/2026-11-23_10-00-00"}
    assert re.fullmatch("[0-9a-f]{32}", comet.init_args.experiment_key)
    chosen = parsed("WandbLogger", save_dir="/data", id="mine"), parsed("MLFlowLogger", tracking_uri="http://host:5000")
    chosen = all_placed(run, list(chosen))
    assert (chosen[0].init_args.save_dir, chosen[0].init_args.id) == ("/data", "mine")
    assert chosen[1].init_args.tracking_uri == "http://host:5000"
    for nothing in (None, True, False, []):
        assert placed(run, nothing, False) == nothing


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
    assert re.fullmatch(r"qwen-2026-11-23_10-00-00-[0-9a-f]{8}", found.init_args.pop("id"))
    name = {"experiment_name": "qwen/2026-11-23_10-00-00"}
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
        (mlflow,) = all_placed(moved, [parsed("MLFlowLogger", tracking_uri=uri)], resumes=True)
        assert mlflow.init_args.run_id == run_id
        (mlflow,) = all_placed(moved, [parsed("MLFlowLogger", tracking_uri=uri)])  # starts again
        assert mlflow.init_args.run_id is None


class Noted(CometLogger):
    """Logger whose run has a name, without its package."""

    def __init__(self, version: str) -> None:
        self.told: list[Any] = []
        self.own_version = version

    version = property(lambda self: self.own_version)

    def log_hyperparams(self, params: Any) -> None:
        self.told.append(params)


Noted.__name__ = "CometLogger"


def test_a_run_is_further_on_a_server_unless_it_is_resumed(tmp_path: Path) -> None:
    run, copy = tmp_path / "run", tmp_path / "copy"
    run.mkdir()
    first, again = (all_placed(run, [parsed("WandbLogger"), parsed("CometLogger")]) for _ in range(2))
    for one, other, key in zip(first, again, ("id", "experiment_key"), strict=True):
        assert one.init_args[key] != other.init_args[key]  # a folder may have been removed, or be another user's
    comet = Noted(first[1].init_args.experiment_key)
    log_recipe([comet], {"lr": 0.1}, run)
    assert comet.told == [{"lr": 0.1}]
    shutil.copytree(run, copy)
    assert all_placed(run, [parsed("CometLogger")], True)[0].init_args.experiment_key == comet.version
    assert all_placed(copy, [parsed("CometLogger")], True)[0].init_args.experiment_key != comet.version
    (run / "logger_runs.json").unlink()
    (run / "config.yaml").touch()  # of a version without these notes
    (wandb,) = all_placed(run, [parsed("WandbLogger")], True)
    assert wandb.init_args.id == f"{tmp_path.name}-run"
    (run / "logger_runs.json").write_text("{")
    with pytest.raises(RecipeError, match=r"logger_runs.json: JSONDecodeError: .*; remove it, and a resumed run is"):
        all_placed(run, [parsed("WandbLogger")], True)


def test_comet_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RecipeError, match="CometLogger logs nothing; leave it out, and set COMET_START_ONLINE=0 in"):
        placed(tmp_path / "run", parsed("CometLogger", online=False), False)
    placed(tmp_path / "run", parsed("CometLogger"), False)
    assert not (tmp_path / "run").exists()
    monkeypatch.setenv("COMET_START_ONLINE", "0")
    placed(tmp_path / "run", parsed("CometLogger"), False)
    (resumed,) = all_placed(tmp_path / "run", [parsed("CometLogger")], True)
    assert resumed.dict_kwargs["offline_directory"] == str(tmp_path / "run" / "comet" / "start-2")
    assert (tmp_path / "run" / "comet" / "start-1").is_dir()


def test_commands_that_only_read_a_recipe_begin_nothing() -> None:
    given = [parsed("CometLogger"), parsed("WandbLogger"), False]
    comet, wandb, no = idle(given)  # type: ignore[misc]
    assert (comet.init_args.online, given[0].init_args.online) == (False, None)  # type: ignore[union-attr]
    assert (wandb, no) == (given[1], False)
    assert idle(None) is None


def test_lit_logger_without_a_login(monkeypatch: pytest.MonkeyPatch) -> None:
    def log_in(_: object) -> None:
        raise ConnectionError("No internet connection available")

    monkeypatch.setattr(lightning_loggers.LitLogger, "experiment", property(log_in))
    with pytest.raises(RecipeError, match="LitLogger: ConnectionError: No internet .*; run `lightning login` once"):
        _ = LitLogger.__new__(LitLogger).experiment


class Unreachable(CSVLogger):
    """Logger that begins its run on a server."""

    error: Exception = ConnectionError("no such host")

    @property
    def experiment(self) -> Any:
        """Begins it."""
        raise self.error


def test_a_logger_that_cannot_begin_is_an_error_before_the_model_is_set_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Model(BoringModel):
        def setup(self, stage: str) -> None:
            raise ValueError("its own error")

    def fit(logger: CSVLogger) -> None:
        with explained_starts():
            Trainer(logger=logger, default_root_dir=tmp_path, accelerator="cpu", max_epochs=1).fit(Model())

    with pytest.raises(RecipeError, match="trainer.logger: Unreachable: no such host; see what it needs, or leave it"):
        fit(Unreachable(tmp_path))
    with pytest.raises(RecipeError, match="WandbLogger: no such host; run `wandb login` once, or set WANDB_MODE=off"):
        fit(type("WandbLogger", (Unreachable,), {})(tmp_path))
    monkeypatch.setattr(Unreachable, "error", RecipeError("mine"))
    with pytest.raises(RecipeError, match="^mine$"):
        fit(Unreachable(tmp_path))
    with pytest.raises(ValueError, match="^its own error$"):
        fit(CSVLogger(tmp_path))


def test_a_server_of_mlflow_that_may_not_answer_is_announced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        placed(tmp_path, parsed("MLFlowLogger"), False)
        assert not caplog.messages
        placed(tmp_path, parsed("MLFlowLogger", tracking_uri="http://host:5000"), False)
    assert caplog.messages[0].startswith(
        "MLflow: http://host:5000; MLflow tries a server that does not answer for some"
    )
