"""Seconds from the start of the process to the end of the first optimizer step of the quickstart.

    python -m benchmarks.speed.startup

Each round is a new process, which does the work of ``python -m lit_ft fit --config recipes/quickstart.yaml`` and ends
after the step. Only the file cache of the system is kept between rounds; the token cache is not.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import Callback

PARTS = ("imports", "recipe", "checks and data", "model", "answers and losses before training", "first step")
"""Names of the intervals between two marks."""


class Clock(Callback):
    """Callback that ends the process after the first optimizer step, and prints the time of each mark."""

    marks: list[float] = []  # noqa: RUF012  # of the class: imports end before an instance exists

    def __init__(self) -> None:
        self.marks.append(time.time())

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Mark the end of checks and data."""
        self.marks.append(time.time())

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Mark the end of the model's construction."""
        self.marks.append(time.time())

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Mark the end of the work before training."""
        self.marks.append(time.time())

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Print the marks and end the process."""
        self.marks.append(time.time())
        print(f"MARKS {json.dumps(self.marks)}", flush=True)
        os._exit(0)


def run_child(recipe: str, run_dir: str) -> None:
    """Run ``python -m lit_ft fit`` with marks."""
    from benchmarks.speed.startup import Clock as named_clock  # this file is __main__, and the recipe names the class
    from lit_ft import cli
    from lit_ft.commands import train  # noqa: F401

    named_clock.marks.append(time.time())
    clock = "--trainer.callbacks+=benchmarks.speed.startup.Clock"
    cli.main(["fit", "--config", recipe, clock, "--run_dir", run_dir])


def measure(recipe: str) -> list[float]:
    """Seconds of each part, measured in one process."""
    with tempfile.TemporaryDirectory() as folder:
        environ = {**os.environ, "LIT_FT_CACHE": f"{folder}/cache"}
        command = [sys.executable, "-m", "benchmarks.speed.startup", "--child", recipe, f"{folder}/run"]
        started = time.time()
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
    marks = [line.removeprefix("MARKS ") for line in done.stdout.splitlines() if line.startswith("MARKS ")]
    if not marks:
        raise RuntimeError(done.stderr[-2000:])
    times = [started, *json.loads(marks[0])]
    return [end - start for start, end in pairwise(times)]


def main() -> None:
    """Print the medians over all rounds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--recipe", default="recipes/quickstart.yaml")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        run_child(*options.child)
        return
    from benchmarks.compare import environment

    rounds = [measure(options.recipe) for _ in range(options.rounds)]
    print("| part | median, s | least | most |\n|---|---|---|---|")
    for name, seconds in zip(PARTS, zip(*rounds, strict=True), strict=True):
        print(f"| {name} | {statistics.median(seconds):.2f} | {min(seconds):.2f} | {max(seconds):.2f} |")
    totals = [sum(one) for one in rounds]
    print(f"| **all** | **{statistics.median(totals):.2f}** | {min(totals):.2f} | {max(totals):.2f} |")
    print(f"\n{Path(options.recipe).name}, {options.rounds} rounds\n{environment()}")


if __name__ == "__main__":
    main()
