"""What all callbacks of lit_callbacks together add to an optimiser step, on the quickstart.

    python -m benchmarks.callback_overhead --rounds 6
    python -m benchmarks.callback_overhead --by-callback

Each round is a pair of runs, without and with them, in processes of their own and in alternating order. Both do the
same steps on the same rows with the same random numbers, so step is compared with step. Steps in which the callbacks do
what was asked for on top (tensors followed in steps 1 and 2) and those around a validation are left out and counted.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.profilers import Profiler

from benchmarks.compare import environment

FIRST = 4
"""The first step that counts: before it there are allocation and the steps that MemoryProfiler samples."""


class StepClock(Callback):
    """Stands last, and notes when each optimiser step is over."""

    def __init__(self) -> None:
        """Start with nothing."""
        self.ends: dict[int, tuple[float, float]] = {}
        """By the clock, and of this process's processor time, which other work on the machine does not lengthen."""
        self._is_validating = False

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The step that comes next is not counted."""
        self._is_validating = True

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Note it; a step after a validation has no start."""
        if self._is_validating:
            self.ends.pop(trainer.global_step - 1, None)
            self._is_validating = False
        self.ends[trainer.global_step] = time.perf_counter(), time.process_time()

    def seconds(self) -> dict[int, tuple[float, float]]:
        """Both times by step."""
        return {
            n: (end[0] - self.ends[n - 1][0], end[1] - self.ends[n - 1][1])
            for n, end in self.ends.items()
            if n >= FIRST and n - 1 in self.ends
        }


def all_callbacks(folder: Path) -> list[Callback]:
    """Every callback, as somebody would have it who wants them all."""
    import lit_callbacks as ours

    return [
        ours.FailTogether(),
        ours.GracefulStop(folder / "last.ckpt"),
        ours.ThroughputMonitor(peak=1e11),
        ours.MemoryProfiler(folder / "memory", picture=False),
        ours.SpikeGuard(),
        ours.LossLedger(),
        ours.ForgettingProbe(),
        ours.SampleGenerations(["What is the capital of France?"]),
        ours.RunReport(),
        ours.AdapterMerger(folder / "adapter"),
    ]


class HookClock(Profiler):
    """Processor time of each callback's hooks, step by step."""

    def __init__(self) -> None:
        """Start with nothing."""
        super().__init__()
        self.steps: list[Counter[str]] = [Counter()]
        self._started: dict[str, float] = {}

    def start(self, action_name: str) -> None:
        """Note it."""
        self._started[action_name] = time.process_time()

    def stop(self, action_name: str) -> None:
        """Add it up; the last callback's last hook ends a step."""
        if action_name.startswith("[Callback]") and action_name in self._started:
            name = re.split(r"[{.]", action_name.removeprefix("[Callback]"))[0]
            self.steps[-1][name] += time.process_time() - self._started[action_name]  # type: ignore[assignment]
        if action_name.endswith("StepClock.on_train_batch_end"):
            self.steps.append(Counter())

    def table(self) -> str:
        """Milliseconds a step, by callback."""
        steps = self.steps[FIRST:-1]
        lines = ["| callback | median, ms a step | mean |", "|---|---|---|"]
        for name in sorted({name for step in steps for name in step}):
            times = [step[name] * 1e3 for step in steps]
            lines.append(f"| {name} | {statistics.median(times):.3f} | {statistics.mean(times):.3f} |")
        return "\n".join(lines)


def run_here(what: str, folder: Path, epochs: int, profiler: Profiler | None = None) -> None:
    """Train the quickstart in this process; write each step's seconds to ``steps.json``."""
    from lit_ft.commands.train import TrainingCLI

    clock = StepClock()

    class Chosen(TrainingCLI):
        def _with_defaults(self, given: list[Callback]) -> list[Callback]:
            return [*(all_callbacks(folder) if what == "all" else []), clock]

        def instantiate_trainer(self, **options: Any) -> Trainer:
            return super().instantiate_trainer(**options, **({"profiler": profiler} if profiler else {}))

    arguments = ["fit", "--config", "recipes/quickstart.yaml", "--run_dir", str(folder / "run"), "--merge", "false"]
    Chosen([*arguments, "--trainer.max_epochs", str(epochs), "--trainer.enable_checkpointing", "false"])
    (folder / "steps.json").write_text(json.dumps(clock.seconds()))


def run_once(what: str, epochs: int) -> dict[str, tuple[float, float]]:
    """Seconds by step of a run in a fresh process.

    Raises:
        RuntimeError: it failed; with the end of what it wrote.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.callback_overhead", "--run", what, "--folder", folder]
        done = subprocess.run([*command, "--epochs", str(epochs)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{what} failed:\n{done.stderr[-3000:]}")
        steps: dict[str, tuple[float, float]] = json.loads((Path(folder) / "steps.json").read_text())
        return steps


def main() -> None:
    """Run the rounds and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--run", choices=["bare", "all"])
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--by-callback", action="store_true")
    options = parser.parse_args()
    if options.by_callback:
        with tempfile.TemporaryDirectory() as folder:
            run_here("all", Path(folder), 1, hooks := HookClock())
        print(f"{hooks.table()}\n\n{environment()}")
        return
    if options.run is not None:
        run_here(options.run, options.folder, options.epochs)
        return
    print("| round | steps | ms a step, bare | a step's processor time differs by | share | by the clock |")
    print("|---|---|---|---|---|---|")
    shares = []
    for number in range(options.rounds):
        order = ("bare", "all") if number % 2 == 0 else ("all", "bare")
        runs = {what: run_once(what, options.epochs) for what in order}
        steps = sorted(runs["bare"].keys() & runs["all"].keys(), key=int)
        wall, cpu = ([(runs["bare"][step][k], runs["all"][step][k]) for step in steps] for k in (0, 1))
        shares.append(share(cpu))
        bare, more = statistics.median(one for one, _ in cpu), statistics.median(two - one for one, two in cpu)
        row = f"| {number + 1} | {len(steps)} | {bare * 1e3:.1f} | {more * 1e3:+.2f} ms | "
        print(row + f"{shares[-1]:+.2%} | {share(wall):+.2%} |", flush=True)
    print(f"\nmedian of the rounds: {statistics.median(shares):+.2%} of a step\n\n{environment()}")


def share(pairs: list[tuple[float, float]]) -> float:
    """The median difference of a step with callbacks to the same step without, over the median step without."""
    return statistics.median(two - one for one, two in pairs) / statistics.median(one for one, _ in pairs)


if __name__ == "__main__":
    main()
