"""Runs for the tests of killed processes."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torture import CASES, Case, Life


def fit(
    folder: Path, recipe: Path, *options: str, case: Case = CASES["one"], prepare: Callable[[], None] = lambda: None
) -> tuple[set[int], str]:
    """Exit codes of a short run in ``folder/run``, and the output of its first rank."""
    log = folder / f"log-{len(list(folder.glob('log-*')))}"
    arguments = ["fit", "--config", str(recipe), "--trainer.max_steps", "4", *options, *case.options]
    life = Life(case, [*arguments, "--trainer.devices", str(case.ranks)], log, prepare=prepare)
    life.wait()
    return set(life.codes.values()), (log / "output-0").read_text()


def in_a_child(function: Callable[..., Any], *arguments: Any) -> int:
    """Run a function in a forked process; returns its exit code, or minus the signal that ended it."""
    if (child := os.fork()) == 0:
        code = 1
        try:
            function(*arguments)
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
