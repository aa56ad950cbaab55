"""Private API of lm-evaluation-harness 0.4.13, and replacements where it has no option: templates, bars, git."""

import subprocess
from pathlib import Path

from datasets import disable_progress_bars
from jinja2 import BaseLoader, StrictUndefined
from jinja2.sandbox import SandboxedEnvironment
from tqdm import tqdm


def task_options(file: Path) -> dict[str, object]:
    """Options in a task's YAML file, and in those that it includes, without running code that it names."""
    from lm_eval.tasks._yaml_loader import load_yaml

    return load_yaml(file, resolve_func=False)


def sandbox_templates() -> None:
    """Render the texts of tasks in Jinja's sandbox from now on: task files are often downloaded."""
    from lm_eval import utils

    sandbox = SandboxedEnvironment(loader=BaseLoader(), undefined=StrictUndefined, keep_trailing_newline=True)
    sandbox.filters.update(utils.env.filters)
    utils.env = sandbox


def look_for_commit_in_silence() -> None:
    """Let the harness, which records git's commit, print no error of git where there is no repository."""
    import lm_eval.evaluator

    lm_eval.evaluator.get_git_commit_hash = _commit


def _commit() -> str | None:
    try:
        found = subprocess.run(["git", "describe", "--always"], capture_output=True, text=True, check=True)
    except (subprocess.CalledProcessError, FileNotFoundError):
        return None
    return found.stdout.strip()


def show_no_progress() -> None:
    """Leave out the harness's progress bars, as in a file or a pipe; it has no option for that."""
    import lm_eval.api.model
    import lm_eval.api.task
    import lm_eval.models.huggingface

    for module in (lm_eval.api.model, lm_eval.api.task, lm_eval.models.huggingface):
        module.tqdm = _no_bar
    disable_progress_bars()


def _no_bar(*args: object, **options: object) -> tqdm:
    return tqdm(*args, **{**options, "disable": True})
