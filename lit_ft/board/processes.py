"""Processes of ``python -m lit_ft`` that outlive the board, each with a record and a log in a folder."""

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from lit_callbacks.durable_writes import write_durably

from lit_ft.errors import RecipeError

PROGRAM = (sys.executable, "-m", "lit_ft")
LOG_BYTES = 256 * 1024
"""Largest part of a log that is shown, from its end."""


@dataclass
class Record:
    """A started process, as ``<folder>/<kind>.json`` keeps it beside ``<kind>.log``.

    Attributes:
        kind: what it is for: ``fit``, ``check``, ``serve``, ``export`` or ``report``.
        arguments: command line after ``python -m lit_ft``.
        pid: process id, also that of its process group.
        started: start of the process in seconds since 1970, by which a later process of the same id is told apart.
        exit_code: exit code, negative for a signal; None while it runs, and where the board ended before it did.
        folder: folder of record and log; in a copy of that folder, the record is of no process of the copy.
    """

    kind: str
    arguments: list[str]
    pid: int
    started: float
    exit_code: int | None = None
    folder: str = ""

    @property
    def command(self) -> str:
        """Command line as a shell takes it."""
        return shlex.join(["python", "-m", "lit_ft", *self.arguments])


class Processes:
    """Starts processes in sessions of their own, finds those of an earlier board, and stops them."""

    def __init__(self, program: Sequence[str] = PROGRAM) -> None:
        """Set the program.

        Args:
            program: command line that the arguments of a process follow.
        """
        self._program = tuple(program)
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._records_lock = threading.RLock()  # pages look in threads; an older record would replace a newer one

    def start(self, folder: Path, kind: str, arguments: Sequence[str]) -> Record:
        """Start a process; its output goes to ``<folder>/<kind>.log``, after that of earlier ones.

        Args:
            folder: folder of record and log; created where it is missing.
            kind: what the process is for.
            arguments: command line after the program.

        Raises:
            RecipeError: one of this kind still runs there, or the folder cannot be written.
        """
        with self._records_lock:
            return self._start(folder, kind, arguments)

    def _start(self, folder: Path, kind: str, arguments: Sequence[str]) -> Record:
        if (earlier := self.running(folder, kind)) is not None:
            raise RecipeError(f"{kind} is running already (process {earlier.pid}); stop it, or wait for its end")
        try:
            folder.mkdir(exist_ok=True)  # not its parent: a run that was deleted does not come back as an empty folder
            with (folder / f"{kind}.log").open("ab") as log:
                log.write(f"$ {shlex.join(['python', '-m', 'lit_ft', *arguments])}\n".encode())
                log.flush()
                child = subprocess.Popen(
                    [*self._program, *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, "PYTHONUNBUFFERED": "1"},
                    start_new_session=True,  # neither Ctrl-C at the board's terminal nor the board's end reaches it
                )
        except OSError as error:
            raise RecipeError(f"{folder} cannot be written ({error.strerror}); choose another folder") from error
        self._children[child.pid] = child
        started = _created(child.pid) or time.time()
        record = Record(kind, list(arguments), child.pid, started, folder=str(folder.resolve()))
        _write(folder, record)
        return record

    def find(self, folder: Path, kind: str) -> Record | None:
        """Record of the last process of a kind; None if there is none, or it is damaged."""
        with self._records_lock:
            return self._find(folder, kind)

    def _find(self, folder: Path, kind: str) -> Record | None:
        try:
            record = Record(**json.loads((folder / f"{kind}.json").read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None
        child = self._children.get(record.pid)
        if record.exit_code is None and child is not None and (code := child.poll()) is not None:
            record.exit_code = code
            _write(folder, record)
        return record

    def running(self, folder: Path, kind: str) -> Record | None:
        """Record of the process of a kind that runs; None if there is none."""
        record = self.find(folder, kind)
        is_here = record is not None and record.folder in ("", str(folder.resolve()))
        return record if record is not None and is_here and self.is_alive(record) else None

    def is_alive(self, record: Record) -> bool:
        """Whether the process of a record still runs."""
        if (child := self._children.get(record.pid)) is not None and child.poll() is not None:
            return False
        created = _created(record.pid)
        return record.exit_code is None and created is not None and abs(created - record.started) < 1

    def stop(self, record: Record) -> None:
        """Send SIGINT to the process group of a record; nothing where it has ended."""
        if self.is_alive(record):
            os.killpg(record.pid, signal.SIGINT)


def _created(pid: int) -> float | None:
    """Start time of a process; None where it does not run, also if its parent has not noticed that yet (a zombie)."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.Error:
        return None


def _write(folder: Path, record: Record) -> None:
    write_durably(folder / f"{record.kind}.json", json.dumps(asdict(record), ensure_ascii=False, indent=1) + "\n")


def log_tail(path: Path, most_bytes: int = LOG_BYTES) -> str:
    """Last lines of a log; empty if there is none."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - most_bytes))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
    return text if size <= most_bytes else text.partition("\n")[2]


def last_line(path: Path) -> str:
    """Last line of a log that is not empty; empty if there is none."""
    lines = [line.strip() for line in log_tail(path, 8192).splitlines()]
    return next((line for line in reversed(lines) if line), "")
