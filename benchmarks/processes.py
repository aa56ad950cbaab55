"""Processes of contestants, each of which imports its packages, waits for its job, and answers with a file."""

import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.contestants import Contestant
from benchmarks.peers.environments import python_of, reason_of
from benchmarks.peers.job import Job

PEAK = "matrix_peak"
"""Measurement that runs in the same rounds as the contestants."""

Run = dict[str, Any]
"""``contestant``, ``setting``, ``round``, and the measurements or ``error``."""


class PeerProcess:
    """Process of a module of ``benchmarks.peers``, started ahead of its work."""

    def __init__(self, python: str, module: str, log: Path) -> None:
        """Start the process.

        Args:
            python: interpreter.
            module: module of ``benchmarks.peers``.
            log: file for the output of the process.
        """
        self._folder, self._log = tempfile.TemporaryDirectory(), log
        self.folder = Path(self._folder.name)
        self._asked, self._answer = self.folder / "asked.json", self.folder / "answer.json"
        command = [python, "-m", f"benchmarks.peers.{module}", str(self._asked), str(self._answer)]
        quiet = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        self._before = _busy_seconds()
        with log.open("w", encoding="utf-8") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=output, env=os.environ | quiet)

    def run(self, asked: dict[str, Any], limit_seconds: float) -> Run:
        """Give the process its work, and wait for its end.

        Args:
            asked: what the module reads.
            limit_seconds: seconds after which the process is ended.

        Returns:
            What the module wrote, or the reason of a failure as ``error``.
        """
        written = self._asked.with_suffix(".part")
        written.write_text(json.dumps(asked), encoding="utf-8")
        written.replace(self._asked)
        try:
            self._process.wait(limit_seconds)
            return self._result()
        except subprocess.TimeoutExpired:
            return {"error": f"took more than {limit_seconds:.0f} s"}
        finally:
            self.end()

    def end(self) -> None:
        """End the process, and remove its files."""
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()

    def _result(self) -> Run:
        if self._answer.is_file():
            result: Run = json.loads(self._answer.read_text(encoding="utf-8"))
            (busy, own, clock), (busy_before, own_before, clock_before) = _busy_seconds(), self._before
            # Example: 0.1 if other processes take both of two cores for one of ten seconds.
            others = (busy - busy_before - (own - own_before)) / (clock - clock_before) / (os.cpu_count() or 1)
            return {**result, "others_share": others}
        said = [line for line in self._log.read_text(encoding="utf-8").splitlines() if line.strip()]
        raised = [line for line in said if re.match(r"[\w.]+(Error|Exception)\b", line)]
        return {"error": (raised or said or ["ended without a word"])[-1].strip()[:300]}


class ContestantProcess:
    """Process of a contestant."""

    def __init__(self, contestant: Contestant, environments: Path | None, log: Path) -> None:
        """Start the process, if the contestant's environment is there.

        Args:
            contestant: contestant to run.
            environments: folder of the peers' environments; None runs them with this interpreter.
            log: file for the output of the process.
        """
        self._options, self._started = dict(contestant.options), time.monotonic()
        self._process: PeerProcess | None = None
        self._error: str | None = None
        python = sys.executable
        if contestant.environment is not None and environments is not None:
            self._error = reason_of(environments, contestant.environment)
            python = str(python_of(environments, contestant.environment))
        if self._error is None:
            self._process = PeerProcess(python, contestant.runner, log)

    def run(self, job: Job, limit_seconds: float) -> Run:
        """Measurements of the contestant, or the reason of a failure as ``error``.

        Args:
            job: work to do; folder, start time and options are replaced.
            limit_seconds: seconds after which the process is ended.
        """
        if self._process is None:
            return {"error": self._error}
        own = replace(job, folder=str(self._process.folder), started=self._started, options=self._options)
        return self._process.run(asdict(own), limit_seconds)

    def end(self) -> None:
        """End the process without work."""
        if self._process is not None:
            self._process.end()


def run_contestant(contestant: Contestant, job: Job, environments: Path | None, log: Path, limit_seconds: float) -> Run:
    """Run a contestant in a new process, and return what ``ContestantProcess.run`` does."""
    return ContestantProcess(contestant, environments, log).run(job, limit_seconds)


def run_peak(asked: dict[str, Any], log: Path, limit_seconds: float = 600) -> Run:
    """Measure the peak of a model's matrix products in a new process; ``asked``: arguments of ``matrix_peak.peaks``."""
    return PeerProcess(sys.executable, PEAK, log).run(asked, limit_seconds)


def _busy_seconds() -> tuple[float, float, float]:
    """Busy seconds of all processors, processor seconds of ended child processes, and seconds of the clock."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    own = children.ru_utime + children.ru_stime
    stat = Path("/proc/stat")
    if not stat.is_file():
        return own, own, time.monotonic()
    user, nice, system = (int(ticks) for ticks in stat.read_text(encoding="utf-8").split()[1:4])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK"), own, time.monotonic()
