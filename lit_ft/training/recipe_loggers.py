"""Loggers of the recipe: they write into the run folder, and a resumed run goes on in its runs on their servers."""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any
from uuid import uuid4

from jsonargparse import Namespace
from lightning.pytorch.loggers import CometLogger, Logger, MLFlowLogger, WandbLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lit_callbacks.durable_writes import write_durably

from lit_ft.errors import RecipeError, explained, first_line
from lit_ft.internals.lightning import starting_logger
from lit_ft.run.folder import RunFolder
from lit_ft.run.launching import is_rank_zero
from lit_ft.training.loggers import LitLogger

MLFLOW_RUNS = "mlflow_runs.json"
"""File of a run folder: its run in MLflow, by place, in which a resumed run goes on."""
LOGGER_RUNS = "logger_runs.json"
"""File of a run folder: its runs on other servers by class of logger, and its name, which a copy of it has not."""


def placed(folder: Path, logger: object, resumes: bool) -> object:
    """The recipe's ``trainer.logger``, with arguments by which loggers that name no place write into the run folder.

    A copy: another run of the same recipe has places of its own.

    Args:
        folder: run folder.
        logger: the option.
        resumes: whether the run goes on from a checkpoint, and so in its runs on the servers of loggers.

    Raises:
        RecipeError: the package of a logger is not installed, or the logger would log nothing.
    """
    loggers = [one.clone() if isinstance(one, Namespace) else one for one in _listed(logger)]
    _put_files_in(folder, loggers, resumes)
    return loggers if isinstance(logger, list) else loggers[0]


def idle(logger: object) -> object:
    """The recipe's ``trainer.logger``, such that nothing is begun when it is built: Comet's begins an experiment."""
    loggers = [one.clone() if isinstance(one, Namespace) else one for one in _listed(logger)]
    for one in loggers:
        if isinstance(one, Namespace) and issubclass(_class_of(one), CometLogger):
            one["init_args.online"] = False
    return loggers if isinstance(logger, list) else loggers[0]


def _class_of(logger: Namespace) -> type:
    module, _, name = logger.class_path.rpartition(".")
    cls: type = getattr(import_module(module), name)
    return cls


def _listed(logger: object) -> list[Any]:
    return logger if isinstance(logger, list) else [logger]


def _put_files_in(folder: Path, loggers: list[Any], resumes: bool) -> None:
    new = uuid4().hex
    for one in loggers:
        if not isinstance(one, Namespace) or not isinstance(arguments := one.get("init_args"), Namespace):
            continue
        cls = _class_of(one)
        parameters = signature(cls).parameters
        for key in {"save_dir", "root_dir"} & parameters.keys():
            if arguments.get(key) == parameters[key].default:
                arguments[key] = str(folder)
        if issubclass(cls, LitLogger) and find_spec("litlogger") is None:  # it looks for the package when it logs
            raise RecipeError("trainer.logger: LitLogger needs the package litlogger; pip install litlogger")
        given: Mapping[str, object] = one.get("dict_kwargs") or {}
        more: dict[str, object] = {}
        noted = _noted_run(folder, cls.__name__) if resumes else None
        if issubclass(cls, WandbLogger) and arguments.id is None:
            arguments.id = noted or re.sub(r"[^\w.-]", "-", f"{_name(folder)}-{new[:8]}")
            arguments.name = arguments.name or _name(folder)
            more = {"resume": "allow"}
        elif issubclass(cls, MLFlowLogger):
            _put_mlflow_in(folder, arguments, resumes)
        elif cls.__name__ == "SwanLabLogger":
            arguments.log_dir = arguments.log_dir or str(folder / "swanlog")
            arguments.experiment_name = arguments.experiment_name or _name(folder)
            if arguments.id is None:
                arguments.id = noted or re.sub(r"[^\w-]", "-", f"{_name(folder)}-{new[:8]}")
                more = {"resume": "allow"}
        elif issubclass(cls, CometLogger):
            more = _put_comet_in(folder, arguments, given, noted or new)
        if more:
            one["dict_kwargs"] = more | dict(given)


def _put_comet_in(folder: Path, arguments: Namespace, given: Mapping[str, object], key: str) -> dict[str, object]:
    """Set the experiment of Comet; further arguments are returned."""
    if arguments.online is False:
        raise RecipeError(
            "trainer.logger: with online: false Lightning's CometLogger logs nothing; leave it out, and set "
            "COMET_START_ONLINE=0 in the environment"
        )
    place = folder / "comet"
    if os.environ.get("COMET_START_ONLINE", "").lower() in ("0", "false") and is_rank_zero():
        # One for each start: names of archives come from the key and from Python's generator, so that of a resumed
        # run, which has the same seed, would replace the earlier one.
        place /= f"start-{1 + len(list(place.glob('start-*')))}"
        place.mkdir(parents=True)  # Comet makes no folder within a new one
    is_named = bool({"name", "experiment_name"} & given.keys()) or arguments.experiment_key is not None
    if arguments.experiment_key is None and "COMET_EXPERIMENT_KEY" not in os.environ:
        arguments.experiment_key = key
    more: dict[str, object] = {"offline_directory": str(place)}
    return more if is_named else more | {"name": _name(folder)}


def _put_mlflow_in(folder: Path, arguments: Namespace, resumes: bool) -> None:
    # MLflow would draw a name from Python's generator: the same one for all runs of a seed.
    arguments.run_name = arguments.run_name or _name(folder)
    if arguments.tracking_uri is None:
        arguments.tracking_uri = _own_store(folder)
        arguments.artifact_location = arguments.artifact_location or str(folder.absolute() / "mlflow")
    elif str(arguments.tracking_uri).startswith("http"):
        rank_zero_info(
            f"MLflow: {arguments.tracking_uri}; MLflow tries a server that does not answer for some minutes "
            "(MLFLOW_HTTP_REQUEST_MAX_RETRIES in the environment: fewer times)"
        )
    if resumes:
        arguments.run_id = arguments.run_id or _mlflow_runs(folder).get(_place(folder, arguments.tracking_uri))


def _name(folder: Path) -> str:
    """Name of a run where others of other recipes are beside it."""
    return f"{folder.absolute().parent.name}/{folder.name}"


def _own_store(folder: Path) -> str:
    return f"sqlite:///{folder.absolute()}/mlflow.db"  # MLflow 3 refuses plain files


def _place(folder: Path, tracking_uri: str) -> str:
    """Key of a tracking URI in ``MLFLOW_RUNS``, which holds for a folder that was moved."""
    return "mlflow.db" if tracking_uri == _own_store(folder) else tracking_uri


def _mlflow_runs(folder: Path) -> dict[str, str]:
    """MLflow's runs of a run folder, by ``_place``."""
    return _read(folder / MLFLOW_RUNS, "remove it, and a resumed run is a further one in MLflow")


def _noted_run(folder: Path, name: str) -> str | None:
    """Run of a logger, by the name of its class, in which a resumed run goes on; None where it begins a further one."""
    notes = _read(folder / LOGGER_RUNS, "remove it, and a resumed run is a further one for its loggers")
    if notes:
        return notes.get(name) if notes["folder"] == _name(folder) else None
    # Versions before these notes named it by the folder.
    begun = name != "CometLogger" and RunFolder(folder).config.is_file()
    return re.sub(r"[^\w.-]" if name == "WandbLogger" else r"[^\w-]", "-", _name(folder)) if begun else None


def _read(file: Path, fix: str) -> dict[str, str]:
    if not file.is_file():
        return {}
    with explained(f"{file}", fix):
        return dict(json.loads(file.read_text(encoding="utf-8")))


def log_recipe(loggers: Sequence[Logger], recipe: dict[str, Any], folder: Path) -> None:
    """Log the recipe of a run; note its runs on servers, in which it goes on when it is resumed.

    MLflow refuses to change parameters, so that a resumed run keeps those of its start.

    Args:
        loggers: loggers of the run.
        recipe: its resolved recipe.
        folder: its folder.
    """
    notes: dict[str, str] = {}
    for logger in loggers:
        name = type(logger).__name__
        if isinstance(logger, WandbLogger | CometLogger) or name == "SwanLabLogger":
            notes[name] = str(logger.version)
        if not isinstance(logger, MLFlowLogger):
            logger.log_hyperparams(recipe)
            continue
        place, runs = _place(folder, logger.experiment.tracking_uri), _mlflow_runs(folder)
        if runs.get(place) == logger.run_id:
            logger.experiment.update_run(logger.run_id, status="RUNNING")
            rank_zero_info(f"MLflow: goes on in run {logger.run_id}, whose parameters stay those of its start")
        else:
            logger.log_hyperparams(recipe)
            write_durably(folder / MLFLOW_RUNS, json.dumps(runs | {place: logger.run_id}) + "\n")
    if notes:
        write_durably(folder / LOGGER_RUNS, json.dumps({"folder": _name(folder)} | notes) + "\n")


# --- errors of their servers --------------------------------------------------------------------------

_FIXES = {
    "WandbLogger": "run `wandb login` once, or set WANDB_MODE=offline in the environment where there is no network",
    "SwanLabLogger": "run `swanlab login` once, or set its mode to offline where there is no network",
    "MLFlowLogger": "see that its tracking_uri can be reached, or leave tracking_uri out: RUN/mlflow.db",
}


@contextmanager
def explained_starts() -> Iterator[None]:
    """Turn what a logger raises when its run begins, which is before weights are read, into a ``RecipeError``.

    Lightning asks each logger for its ``experiment`` then.

    Raises:
        RecipeError: in place of the exception of the logger's package.
    """
    try:
        yield
    except RecipeError:
        raise
    except Exception as error:
        if (logger := starting_logger(error)) is None:
            raise
        name = type(logger).__name__
        fix = _FIXES.get(name, "see what it needs, or leave it out")
        raise RecipeError(f"trainer.logger: {name}: {first_line(error)}; {fix}") from error
