"""One trial of a sweep: a ``fit`` process in a run folder, and its files there."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lit_callbacks.durable_writes import write_durably
from lit_callbacks.report.report_data import Points, read_metrics

from lit_ft.recipe.callback_checks import METRIC_VARIABLE
from lit_ft.run.folder import RunFolder
from lit_ft.run.lock import is_running
from lit_ft.run.state import finished_step
from lit_ft.sweeps.search_space import described


@dataclass
class Trial:
    """A trial and its files: ``trial.json`` (values, time, failure) and ``output.log`` beside those of ``fit``.

    Attributes:
        run: run folder.
        values: varied options and their values.
        seconds: time of its processes that came to an end.
        failure: last line of the process that failed last; None without one.
    """

    run: RunFolder
    values: dict[str, str]
    seconds: float = 0.0
    failure: str | None = None

    @classmethod
    def read(cls, root: Path) -> "Trial | None":
        """Trial that an earlier process of the sweep has started in a folder; None if there is none."""
        try:
            saved = json.loads((root / "trial.json").read_text(encoding="utf-8"))
            return cls(RunFolder(root), dict(saved["values"]), float(saved["seconds"]), saved["failure"])
        except FileNotFoundError:
            return None

    def write(self) -> None:
        """Write ``trial.json``."""
        self.run.create()
        content = {"values": self.values, "seconds": self.seconds, "failure": self.failure}
        write_durably(self.run.root / "trial.json", json.dumps(content, ensure_ascii=False, indent=2) + "\n")

    @property
    def name(self) -> str:
        """Name of the trial, e.g. ``trial-001``."""
        return self.run.root.name

    @property
    def log(self) -> Path:
        """Output of the trial's processes."""
        return self.run.root / "output.log"

    @property
    def is_finished(self) -> bool:
        """Whether its training came to its end."""
        return finished_step(self.run.finished) is not None

    @property
    def steps(self) -> int:
        """Optimizer steps of a finished trial; 0 of another."""
        return finished_step(self.run.finished) or 0

    @property
    def state(self) -> str:
        """``finished``, ``failed`` or ``unfinished``."""
        return "finished" if self.is_finished else "failed" if self.failure is not None else "unfinished"

    def train(self, arguments: Sequence[str], metric: str) -> None:
        """Run ``fit`` in a process of its own up to its end, or resume it; a failure is recorded, not raised.

        Args:
            arguments: options of ``fit`` that all trials share.
            metric: what trials are compared by; ``fit`` refuses a recipe that ends before it is logged.

        Raises:
            SystemExit: a signal stops the sweep; the trial has saved its state.
        """
        if is_running(self.run.root):
            rank_zero_info(f"{self.name} still runs, left by an earlier process of the sweep: waiting for its end")
            while is_running(self.run.root):
                time.sleep(1)
            if self.is_finished:
                return
        self.failure = None
        self.write()
        options = [f"--{key}={value}" for key, value in self.values.items()]
        options += ["--run_dir", str(self.run.root), "--resume", "auto"]
        started = time.monotonic()
        with self.log.open("ab") as log:
            # In a session of its own: on Ctrl-C the terminal signals this process only, which passes the signal on.
            process = subprocess.Popen(
                [sys.executable, "-m", "lit_ft", "fit", *arguments, *options],
                stdout=log,
                stderr=log,
                env={**os.environ, METRIC_VARIABLE: metric},
                start_new_session=True,
            )
            try:
                code = process.wait()
            except SystemExit as stop:
                process.send_signal(signal.SIGINT if stop.code == 128 + signal.SIGINT else signal.SIGTERM)
                process.wait()
                rank_zero_info(f"{self.name} is stopped; the same command goes on with the sweep")
                raise
            finally:
                self.seconds += time.monotonic() - started
                self.write()
        if code != 0:
            self.failure = f"exit code {code}: {self._last_line()}"
        self.write()

    def error_of_option(self, option: str) -> str | None:
        """Error of the failed process that begins with the name of an option; None if it is another, or none."""
        match = re.match(rf"exit code \d+: lit_ft: error: (--{option} .+)", self.failure or "")
        return match[1] if match else None

    def _last_line(self) -> str:
        lines = [line.strip() for line in self.log.read_text(encoding="utf-8", errors="replace").splitlines()]
        return next((line for line in reversed(lines) if line), "no output")

    @property
    def next_command(self) -> str | None:
        """Command that the run names at its end; None if it names none."""
        commands = re.findall(r"^next: (.+)$", self.log.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
        return commands[-1] if commands else None

    def metrics(self) -> list[str]:
        """Names of the metrics that the run has logged."""
        return sorted(self._curves())

    def curve(self, metric: str) -> list[tuple[int, float]]:
        """Completed optimizer steps and values of a metric; empty if it was not logged."""
        return [(int(step), value) for step, value in self._curves().get(metric, [])]

    def _curves(self) -> dict[str, Points]:
        try:
            return read_metrics(self.run.root / "metrics.csv")
        except FileNotFoundError:
            return {}

    def __str__(self) -> str:
        return f"{self.name} ({described(self.values)})"
