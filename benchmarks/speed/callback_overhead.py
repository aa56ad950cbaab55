"""Overhead of all callbacks of lit_callbacks together per optimizer step, on the quickstart.

    python -m benchmarks.speed.callback_overhead --rounds 6
    python -m benchmarks.speed.callback_overhead --by-callback

A round is a pair of processes that both have all callbacks, train on the same rows with the same random numbers, and
alternate: one waits while the other takes the same step. In each block of ten steps, the callbacks are disabled in one
of the two processes, which alternates too. So a temporary slowdown of the machine affects both, and a difference in
speed between the processes, some percent for as long as they live, is in both sides of the comparison.

The mean includes work of some steps only: logging and writing. One-time work is excluded and in the last column of
--by-callback: before the first step, in steps 1 and 2, whose tensors are tracked, around validations and at the end.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.profilers import Profiler

from benchmarks.compare import environment

FIRST = 10
"""Number of steps before the timed ones: steps with allocation, and those that MemoryProfiler samples."""
BLOCK = 10
"""Length of a block with or without callbacks in steps, equal to the logging interval. A block begins with the logged
step: a callback that is enabled after it would notice that a logging step has passed, and log."""
Seconds = tuple[float, float]
"""Seconds of the clock, and processor seconds of all threads of the process: two here, which busy-wait."""


def now() -> Seconds:
    """Current time."""
    return time.perf_counter(), time.process_time()


class StepClock(Callback):
    """Last callback, which times each optimizer step with or without the other callbacks."""

    def __init__(self, turns: Sequence[int] = (), without: int | None = None) -> None:
        """Set the other process and the blocks.

        Args:
            turns: file descriptors: one to read this process's turn from, one to write the other process's turn to.
            without: parity of the blocks in which the other callbacks are disabled, 0 or 1; None never disables them.
        """
        self.seconds: dict[int, Seconds] = {}
        self._turns, self._without = turns, without
        self._begun: Seconds | None = None
        self._has_turn = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Store the callbacks that can be disabled."""
        of: Any = trainer
        self._all: tuple[Any, Any, Any] = of.callbacks, of.profiler, pl_module.record_losses

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Exclude the next step."""
        if not trainer.sanity_checking:
            self._begun = None
            self._put(trainer, pl_module, back=True)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Record the step's time, and wait for the other process's step."""
        step = trainer.global_step
        if self._begun is not None and step > FIRST:
            clock, processor = now()
            self.seconds[step] = clock - self._begun[0], processor - self._begun[1]
        if self._turns:
            with suppress(BrokenPipeError):  # the other process has ended
                if self._has_turn:
                    os.write(self._turns[1], b".")
                self._has_turn = os.read(self._turns[0], 1) != b""
        if step >= FIRST and self._without is not None:
            self._put(trainer, pl_module, back=(step + 1) // BLOCK % 2 != self._without)
        self._begun = now()

    def _put(self, trainer: Any, module: Any, back: bool) -> None:
        callbacks, profiler, record = self._all
        trainer.callbacks = callbacks if back else [self]
        trainer.profiler = profiler if back else profiler.inner
        module.record_losses = record if back else None


def all_callbacks(folder: Path) -> list[Callback]:
    """All callbacks with usual settings."""
    import lit_callbacks as ours

    return [
        ours.RankFailureWatchdog(),
        ours.GracefulStop(folder / "last.ckpt"),
        ours.ThroughputMonitor(peak=1e11),
        ours.MemoryProfiler(folder / "memory", picture=False),
        ours.SpikeGuard(),
        ours.LossLedger(write_every_n_steps=2 * 100),  # in steps of the run, half of which it sees
        ours.ForgettingProbe(),
        ours.SampleGenerations(["What is the capital of France?"]),
        ours.RunReport(),
        ours.AdapterMerger(folder / "adapter"),
    ]


class HookClock(Profiler):
    """Profiler of the training thread's time in the hooks of each callback, per step."""

    def __init__(self) -> None:
        """Start without measurements."""
        super().__init__()
        self.steps: list[Counter[str]] = [Counter()]
        self._started: dict[str, float] = {}

    def start(self, action_name: str) -> None:
        """Record the start of an action."""
        self._started[action_name] = time.thread_time()

    def stop(self, action_name: str) -> None:
        """Add the time of an action; the last hook of the last callback ends a step."""
        if action_name.startswith("[Callback]") and action_name in self._started:
            name = re.split(r"[{.]", action_name.removeprefix("[Callback]"))[0]
            self.steps[-1][name] += time.thread_time() - self._started[action_name]  # type: ignore[assignment]
        if action_name.endswith("StepClock.on_train_batch_end"):
            self.steps.append(Counter())

    def table(self) -> str:
        """Markdown table of milliseconds per timed step and of the other seconds, by callback."""
        steps = self.steps[FIRST:-1]
        lines = ["| callback | median, ms a step | mean | once a run, s |", "|---|---|---|---|"]
        total = sum(self.steps, Counter[str]())
        in_steps = {name: sum(step[name] for step in steps) for name in total}
        for name in sorted(total, key=lambda name: -in_steps[name]):
            median = statistics.median(step[name] for step in steps)
            times = f"{median * 1e3:.3f} | {in_steps[name] / len(steps) * 1e3:.3f} | {total[name] - in_steps[name]:.2f}"
            lines.append(f"| {name} | {times} |")
        return "\n".join(lines)


def run_here(folder: Path, epochs: int, clock: StepClock, profiler: Profiler | None = None) -> None:
    """Train the quickstart in this process; write each step's seconds to ``seconds.json``."""
    from lit_ft.commands.train import TrainingCLI

    class Chosen(TrainingCLI):
        def _with_defaults(self, given: list[Callback]) -> list[Callback]:
            return [*all_callbacks(folder), clock]

        def instantiate_trainer(self, **options: Any) -> Trainer:
            return super().instantiate_trainer(**options, **({"profiler": profiler} if profiler else {}))

    arguments = ["fit", "--config", "recipes/quickstart.yaml", "--run_dir", str(folder / "run"), "--merge", "false"]
    Chosen([*arguments, "--trainer.max_epochs", str(epochs), "--trainer.enable_checkpointing", "false"])
    (folder / "seconds.json").write_text(json.dumps(clock.seconds))


def run_pair(epochs: int) -> list[dict[int, Seconds]]:
    """Seconds by step of two processes; each step has the callbacks enabled in exactly one of them.

    Raises:
        RuntimeError: a process failed; the message has the end of its output.
    """
    with tempfile.TemporaryDirectory() as root:
        (read_0, write_0), (read_1, write_1) = os.pipe(), os.pipe()
        folders = [Path(root) / name for name in "01"]
        started = []
        for which, (folder, turns) in enumerate(zip(folders, ((read_0, write_1), (read_1, write_0)), strict=True)):
            folder.mkdir()
            command = [sys.executable, "-m", "benchmarks.speed.callback_overhead", "--folder", str(folder)]
            command += ["--epochs", str(epochs), "--without", str(which), "--turns", *map(str, turns)]
            with (folder / "said").open("w") as said:
                started.append(subprocess.Popen(command, stdout=said, stderr=said, pass_fds=turns))
        os.write(write_0, b".")
        for file in (read_0, write_0, read_1, write_1):
            os.close(file)
        if any(codes := [process.wait() for process in started]):
            ends = "\n".join((folder / "said").read_text()[-3000:] for folder in folders)
            raise RuntimeError(f"exit codes {codes}:\n{ends}")
        found = [json.loads((folder / "seconds.json").read_text()) for folder in folders]
        return [{int(step): seconds for step, seconds in one.items()} for one in found]


def take_round(number: int, epochs: int) -> list[float]:
    """Run a pair of processes, print a row of the table, and return its relative overheads."""
    pair = run_pair(epochs)
    # For each step, the process in which the callbacks are disabled.
    bare = {step: step // BLOCK % 2 for step in sorted(pair[0].keys() & pair[1].keys())}
    shares = []
    for kind in (1, 0):
        less = {n: pair[which][n][kind] for n, which in bare.items()}
        more = {n: pair[1 - which][n][kind] - less[n] for n, which in bare.items()}
        for average in (statistics.median, statistics.mean):
            halves = [average([more[n] for n in bare if bare[n] == which]) for which in (0, 1)]
            shares.append(statistics.mean(halves) / average(less.values()))
    usual = statistics.median(pair[which][step][1] for step, which in bare.items())
    row = [str(number), str(len(bare)), f"{usual * 1e3:.1f}", *(f"{share:+.2%}" for share in shares)]
    print(f"| {' | '.join(row)} |", flush=True)
    return shares


def main() -> None:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--by-callback", action="store_true")
    parser.add_argument("--folder", type=Path, help="for a process of a pair, as are those that follow")
    parser.add_argument("--without", type=int)
    parser.add_argument("--turns", type=int, nargs=2)
    options = parser.parse_args()
    if options.by_callback:
        with tempfile.TemporaryDirectory() as folder:
            run_here(Path(folder), 1, StepClock(), hooks := HookClock())
        print(f"{hooks.table()}\n\n{environment()}")
        return
    if options.folder is not None:
        run_here(options.folder, options.epochs, StepClock(options.turns, options.without))
        return
    print("| round | steps | ms a step without | processor time, median | mean | clock, median | mean |")
    print("|---|---|---|---|---|---|---|")
    rounds = [take_round(number, options.epochs) for number in range(1, options.rounds + 1)]
    medians = ", ".join(f"{statistics.median(column):+.2%}" for column in zip(*rounds, strict=True))
    print(f"\nmedians of the rounds: {medians} of a step\n\n{environment()}")


if __name__ == "__main__":
    main()
