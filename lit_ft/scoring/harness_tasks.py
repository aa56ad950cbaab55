"""Tasks of lm-evaluation-harness by name or by file, read with their data before any weights are loaded."""

import logging
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from jinja2 import TemplateError
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lit_ft.errors import LIBRARY_ERRORS, RecipeError, check_installed, first_line
from lit_ft.internals.hub import use_the_cache_without_a_network
from lit_ft.internals.lm_eval import look_for_commit_in_silence, sandbox_templates, show_no_progress, task_options
from lit_ft.scoring.task_files import check_task_file

if TYPE_CHECKING:  # of the extra `evaluate`
    from lm_eval.api.group import Group
    from lm_eval.api.task import Task
    from lm_eval.tasks import TaskManager

_LOCAL_LOADERS = ("json", "csv", "text", "parquet", "arrow", "pandas", "xml")
"""Values of ``dataset_path`` with which ``datasets`` reads the files of ``data_files``."""

_CHATTER = ("`pretrained` model kwarg", "Passed an already-initialized", "Overwriting default num_fewshot")
"""Beginnings of warnings about what is meant: a model that is passed in, and ``--num_fewshot``."""
_LOADING_ERRORS: tuple[type[Exception], ...] = (*LIBRARY_ERRORS, yaml.YAMLError, TemplateError)


def load_tasks(names: Sequence[str], manager: "TaskManager | None" = None) -> "list[Task | Group]":
    """Read tasks with their data.

    Args:
        names: names of tasks, groups or tags, or paths of YAML files.
        manager: list of the known names; None takes the harness's own, unless all are files.

    Raises:
        RecipeError: a task is unknown, runs code that is not allowed, or its data cannot be read.
    """
    check_installed("--tasks needs", "evaluate", "lm_eval")
    from lm_eval.tasks import TaskManager

    sandbox_templates()
    look_for_commit_in_silence()
    if not sys.stderr.isatty():
        show_no_progress()
    for name in ("lm_eval.models.huggingface", "lm_eval.evaluator"):
        logging.getLogger(name).addFilter(_is_news)
    files = [name for name in names if _is_file(name)]
    for file in files:
        check_task_file(Path(file).expanduser().resolve())
    if manager is None:
        if len(files) < len(names):
            rank_zero_info("reading the list of tasks of lm-evaluation-harness")
        manager = TaskManager(include_defaults=len(files) < len(names))
    for name in names:
        if name not in files and name not in manager.task_index:
            raise _unknown(name, manager.all_tasks)
    if any(_data_of(manager, name, name in files) is not None for name in names):
        use_the_cache_without_a_network()
    loaded: dict[str, Any] = {"tasks": {}, "groups": {}, "group_map": {}}
    for name in names:
        entries: Any = _load(manager, name, name in files)
        for part, members in loaded.items():
            if twice := sorted(members.keys() & entries.get(part, {}).keys()):
                raise RecipeError(f"--tasks has {twice[0]!r} twice; name it once")
            members.update(entries.get(part, {}))
    grouped = {name for members in loaded["group_map"].values() for name in members}
    every = {**loaded["groups"], **loaded["tasks"]}
    return [member for name, member in every.items() if name not in grouped]


def _is_news(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_CHATTER)


def _is_file(name: str) -> bool:
    """Whether a name means a file.

    Raises:
        RecipeError: it means one that does not exist.
    """
    path = Path(name).expanduser()
    looks_like_one = path.suffix in (".yaml", ".yml")
    if looks_like_one and not path.is_file():
        raise RecipeError(f"--tasks {name}: there is no such file; name a YAML file, or a task of the harness")
    return looks_like_one


def _unknown(name: str, known: Sequence[str]) -> RecipeError:
    near = get_close_matches(name, known, n=3)
    advice = f"did you mean {', '.join(near)}?" if near else "`lm_eval ls tasks` lists them; a file ends in .yaml"
    return RecipeError(f"--tasks {name}: lm-evaluation-harness has no task, group or tag of that name; {advice}")


def _load(manager: "TaskManager", name: str, is_file: bool) -> Any:
    try:
        return manager.load([str(Path(name).expanduser()) if is_file else name])
    except ImportError as error:
        raise RecipeError(f"--tasks {name} needs a package that is not installed ({error}); install it") from error
    except _LOADING_ERRORS as error:
        if (data := _data_of(manager, name, is_file)) is not None and not isinstance(error, KeyError):
            raise RecipeError(
                f"--tasks {name} reads the data set {data!r} of the Hugging Face hub, which cannot be had "
                f"({type(error).__name__}: {first_line(error)}); run it once where there is a network and keep "
                "HF_HOME, or give a YAML file over local data (docs/after_fit.md)"
            ) from error
        raise RecipeError(
            f"--tasks {name} cannot be read ({type(error).__name__}: {first_line(error)}); mend the task's file, or "
            "its data_files"
        ) from error


def _data_of(manager: "TaskManager", name: str, is_file: bool) -> str | None:
    """Hub id of the data that a task, or the first one of a group, reads; None where it is local or not known."""
    entry = None if is_file else manager.task_index[name]
    file = Path(name).expanduser() if entry is None else entry.yaml_path
    path = None if file is None else task_options(file).get("dataset_path")
    if path is None:
        return None if is_file else name
    is_local = path in _LOCAL_LOADERS or Path(str(path)).expanduser().exists()
    return None if is_local else str(path)
