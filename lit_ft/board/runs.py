"""Runs below some folders, read from their files alone: no matter who started them."""

import json
import os
import re
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from lit_callbacks.report.report_data import ENVIRONMENT, Points, read_last_metrics, read_metrics

from lit_ft.board.processes import Processes, last_line, log_tail
from lit_ft.errors import RecipeError
from lit_ft.run.folder import RunFolder
from lit_ft.run.lock import is_running
from lit_ft.run.state import finished_step

State = Literal["starting", "running", "finished", "failed", "stopped"]
BOARD = "board"
"""Folder in a run's folder with the records and logs of processes that the board has started."""
DEPTH = 4
"""Levels of folders below a folder of runs that are searched."""
_LISTED = ("train/loss", "val/loss")
"""Metrics whose last values the list of runs shows."""
_MARKS = ("checkpoints", ".lock", "finished.json", "metrics.csv", "environment.json")
_STEP = re.compile(r"^step [\d,]+ of ([\d,]+)|, ([\d,]+) optimizer steps;", re.MULTILINE)
_Content = TypeVar("_Content")


@dataclass(frozen=True)
class Summary:
    """A run in the list.

    Attributes:
        name: address of the run: number of the folder of runs, and the path below it, which may be none.
        folder: the run's folder.
        state: what it does.
        step: last logged optimizer step, counted from 1; 0 before the first.
        steps: optimizer steps that it is to take, where a file says so.
        loss: last training loss.
        val_loss: last validation loss.
        changed: time of the last change, in seconds since 1970.
        failure: error of a process that failed; without one, how it ended, and its last line.
    """

    name: str
    folder: RunFolder
    state: State
    step: int
    steps: int | None
    loss: float | None
    val_loss: float | None
    changed: float
    failure: str = ""

    @property
    def title(self) -> str:
        """Name of the run without the number of the folder of runs."""
        return title_of(self.name, self.folder)

    @property
    def is_active(self) -> bool:
        """Whether a process trains."""
        return self.state in ("starting", "running")


class Runs:
    """Listing of the runs; a name that is not in it is no run, whatever path it spells."""

    def __init__(self, roots: Sequence[Path], processes: Processes) -> None:
        """Set the folders.

        Args:
            roots: folders of runs; new ones are written to the first.
            processes: processes that the board starts.
        """
        self.roots = [root.expanduser().resolve() for root in roots]
        self._processes = processes

    def folders(self) -> dict[str, Path]:
        """Folders of all runs by name."""
        folders: dict[str, Path] = {}
        for number, root in enumerate(self.roots):
            for folder in _runs_below(root, DEPTH):
                below = folder.relative_to(root).parts
                folders.setdefault("/".join((str(number), *below)), folder)
        return folders

    def folder(self, name: str) -> RunFolder:
        """Folder of a run.

        Raises:
            RecipeError: the listing has no run of this name.
        """
        if (folder := self.folders().get(name)) is None:
            raise RecipeError(f"there is no run {name!r}; the start page lists all")
        return RunFolder(folder)

    def summaries(self) -> list[Summary]:
        """All runs, those that changed last first."""
        summaries = [self.summary(name, RunFolder(folder)) for name, folder in self.folders().items()]
        return sorted(summaries, key=lambda one: (one.is_active, one.changed), reverse=True)

    def summary(self, name: str, run: RunFolder) -> Summary:
        """Summary of a run."""
        logged = _read(_last_logged, run) or _Logged(0, None, None)
        state, failure = self._state(run)
        step = finished_step(run.finished) or logged.step
        return Summary(
            name, run, state, step, self._steps(run), logged.loss, logged.val_loss, _changed(run.root), failure
        )

    def curves(self, run: RunFolder) -> dict[str, Points]:
        """Logged metrics of a run: steps and values by name; read again only when the file has changed."""
        return _read(_curves, run) or {}

    def environment(self, run: RunFolder) -> dict[str, Any]:
        """Versions, times and peak memory that ``RunReport`` writes; empty before."""
        try:
            environment = json.loads((run.root / ENVIRONMENT).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return environment if isinstance(environment, dict) else {}

    def _state(self, run: RunFolder) -> tuple[State, str]:
        started = self._processes.running(run.root / BOARD, "fit")
        if is_running(run.root):
            return "running", ""
        if started is not None:
            return "starting", ""
        if finished_step(run.finished) is not None:
            return "finished", ""
        line = last_line(log_of(run))
        record = self._processes.find(run.root / BOARD, "fit")
        code = None if record is None else record.exit_code
        if line.startswith(("lit_ft: error", "lit_ft: failed")):
            return "failed", line
        if code not in (None, 0, 130, 143):
            return "failed", f"{end_of(code)}; its last line: {line}" if line else end_of(code)
        return "stopped", ""

    def _steps(self, run: RunFolder) -> int | None:
        steps = _STEP.findall(log_tail(log_of(run)))
        return int("".join(steps[-1]).replace(",", "")) if steps else None


class _Logged(NamedTuple):
    """What a run has logged last."""

    step: int
    loss: float | None
    val_loss: float | None


Stamp = tuple[int, int]
"""Time of change (ns) and size of a file."""


@lru_cache(maxsize=10_000)
def _last_logged(metrics: Path, stamp: Stamp) -> _Logged:
    curves = read_last_metrics(metrics, _LISTED)
    step = max((points[-1][0] for points in curves.values()), default=0)
    loss, val_loss = (curves[name][-1][1] if name in curves else None for name in _LISTED)
    return _Logged(int(step), loss, val_loss)


@lru_cache(maxsize=8)  # those of runs that are looked at: of a thousand runs they would take gigabytes
def _curves(metrics: Path, stamp: Stamp) -> dict[str, Points]:
    return read_metrics(metrics)


def _read(read: Callable[[Path, Stamp], _Content], run: RunFolder) -> _Content | None:
    """What a function reads of a run's logged metrics; None where there are none."""
    metrics = run.root / "metrics.csv"
    try:
        stat = metrics.stat()
        return read(metrics, (stat.st_mtime_ns, stat.st_size))
    except (OSError, ValueError):  # not there yet, or being replaced
        return None


def title_of(name: str, run: RunFolder) -> str:
    """Path of a run below its folder of runs; its folder's name where it is that folder."""
    return name.partition("/")[2] or run.root.name


def log_of(run: RunFolder) -> Path:
    """Console log of a run: of the board's process, or of a sweep's trial; it may not exist."""
    own = run.root / BOARD / "fit.log"
    return own if own.exists() else run.root / "output.log"


def end_of(exit_code: int) -> str:
    """How a process ended: by a signal where its exit code is negative."""
    return f"killed by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"exit code {exit_code}"


def process_of_lock(run: RunFolder) -> int | None:
    """Process that trains in a folder, where it is one of this machine; None if it is not known."""
    if not is_running(run.root):  # the id may be another process's by now, or be in a copy of the folder
        return None
    try:
        holder = json.loads((run.root / ".lock").read_text(encoding="utf-8"))
        return int(holder["pid"]) if holder["host"] == socket.gethostname() else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _runs_below(folder: Path, depth: int) -> Iterator[Path]:
    """Folders of runs, without looking into them; links are not followed."""
    if _is_run(folder):
        yield folder
        return
    if depth == 0:
        return
    try:
        with os.scandir(folder) as entries:
            names = sorted(e.name for e in entries if e.is_dir(follow_symlinks=False) and not e.name.startswith("."))
    except OSError:  # not there yet, or not readable
        return
    for name in names:
        yield from _runs_below(folder / name, depth - 1)


def _is_run(folder: Path) -> bool:
    if (folder / BOARD / "fit.json").is_file():
        return True
    return (folder / "config.yaml").is_file() and any((folder / mark).exists() for mark in _MARKS)


def _changed(root: Path) -> float:
    files = (root / "metrics.csv", root / "finished.json", root / "config.yaml", root / BOARD / "fit.json", root)
    for file in files:
        with suppress(OSError):  # not there, or no more
            return file.stat().st_mtime
    return 0.0
