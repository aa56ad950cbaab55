"""Comparison of lit_ft with its peers on the same workload.

    python -m benchmarks.peers.environments --root ENVIRONMENTS
    python -m benchmarks.compare --data huanhuan.json --environments ENVIRONMENTS
    python -m benchmarks.compare --data huanhuan.json --only lit_ft,bare --setting 16x1

Each contestant runs in its own process and environment, for several rounds in alternating order; medians and spread are
printed. All read the same files: weights, and rows that are tokenized already. The losses of each optimizer step show
that the work is equal. With ``--results`` every run is appended to a file as a line, so that an interrupted comparison
can be continued.

tokens/s: non-padding tokens of the data, divided by the time from the end of the first optimizer step to the end of the
last. MFU: 4 FLOPs per weight of a linear layer and token (frozen weights: the forward pass, and the gradient of the
input), for the head per supervised token only, divided by that time and by the peak FLOP/s of
``benchmarks.peers.matrix_peak`` in the same rounds. Peak memory is measured until the end of the last step; on a CPU it
is the largest resident size of the process, pages of mapped weight files included. The time to the first step begins at
the start of the process.
"""

import argparse
import json
import platform
import statistics
import sys
import tempfile
from datetime import date
from importlib.metadata import version
from pathlib import Path

from benchmarks.contestants import Contestant, contestants
from benchmarks.peers.job import Job
from benchmarks.processes import PEAK, Run, run_contestant, run_peak
from benchmarks.workload import MAX_LENGTH, SHAPES, Work, prepare

SETTINGS = {"1x2": (1, 2), "16x1": (16, 1)}
"""Samples per micro-batch, and micro-batches per optimizer step."""

QUIET = 0.05
"""Largest share of the machine's processor time for other processes during a run; above it, the run is repeated."""


class Comparison:
    """Runs of all contestants on one workload."""

    def __init__(self, work: Work, options: argparse.Namespace) -> None:
        """Continue from the runs in ``options.results``.

        Args:
            work: files that all contestants read.
            options: options of the command line.
        """
        self.work, self.options = work, options
        self.runs: list[Run] = []
        if options.results is not None and options.results.is_file():
            self.runs = [json.loads(line) for line in options.results.read_text(encoding="utf-8").splitlines()]

    def step_tokens(self, setting: str) -> list[tuple[int, int]]:
        """Tokens and supervised tokens of each optimizer step."""
        size, accumulate = SETTINGS[setting]
        lengths, samples = self.work.lengths, size * accumulate
        steps = [lengths[start : start + samples] for start in range(0, len(lengths), samples)]
        return [(sum(tokens for tokens, _ in step), sum(number for _, number in step)) for step in steps]

    def contestants(self, setting: str) -> list[Contestant]:
        """Contestants that the command line selects and that support the setting."""
        only = self.options.only.split(",") if self.options.only else None
        largest = max(tokens for tokens, _ in self.step_tokens(setting))
        everyone = contestants(self.options.device, row_tokens=largest)
        if only and (unknown := set(only) - {one.key for one in everyone}):
            raise SystemExit(f"--only {sorted(unknown)}: there are {', '.join(one.key for one in everyone)}")
        # A contestant that packs samples itself has about the same samples in a step only if that is one packed
        # sequence.
        return [
            one
            for one in everyone
            if (not only or one.key in only) and not (one.joins_samples and SETTINGS[setting][1] > 1)
        ]

    def of(self, key: str, setting: str) -> list[Run]:
        """Runs of a contestant, without those that other processes on the machine disturbed."""
        return [
            run
            for run in self.runs
            if run["contestant"] == key and run["setting"] == setting and run.get("others_share", 0) <= QUIET
        ]

    def run(self, setting: str) -> None:
        """Do the missing runs, in reverse order in every second round."""
        for number in range(self.options.rounds):
            order: list[Contestant | None] = [None, *self.contestants(setting)]
            for contestant in order if number % 2 == 0 else order[::-1]:
                key = contestant.key if contestant else PEAK
                known = self.of(key, setting)
                if len(known) > number or any("error" in run for run in known):
                    continue
                result = self._run_once(contestant, setting)
                self._keep({"contestant": key, "setting": setting, "round": number + 1, **result})

    def _keep(self, run: Run) -> None:
        self.runs.append(run)
        if self.options.results is not None:
            with self.options.results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(run) + "\n")
        said = run.get("error") or (
            f"{run['flops_per_second'] / 1e9:.0f} GFLOP/s"
            if run["contestant"] == PEAK
            else f"{self.rates(run)[0]:.1f} tokens/s"
        )
        if (others := run.get("others_share", 0)) > QUIET:
            said += f", others took {others:.0%} of the machine"
        print(f"{run['setting']}, round {run['round']}: {run['contestant']}: {said}", file=sys.stderr, flush=True)

    def _run_once(self, contestant: Contestant | None, setting: str) -> Run:
        logs = self.options.folder / "logs"
        logs.mkdir(exist_ok=True)
        log = logs / f"{contestant.key if contestant else PEAK}-{setting}.txt"
        if contestant is None:
            tokens, supervised = (round(statistics.mean(n)) for n in zip(*self.step_tokens(setting), strict=True))
            asked = {"shape": self.options.model, "device": self.options.device}
            return run_peak({**asked, "tokens": tokens, "supervised": supervised}, log)
        size, accumulate = SETTINGS[setting]
        job = Job(
            model=str(self.work.model),
            rows=str(self.work.rows),
            micro_batch_size=size,
            accumulate=accumulate,
            device=self.options.device,
            max_length=MAX_LENGTH,
        )
        return run_contestant(contestant, job, self.options.environments, log, self.options.limit)

    def rates(self, run: Run) -> tuple[float, float]:
        """Tokens and supervised tokens per second, without the first step."""
        seconds = run["ends"][-1] - run["ends"][0]
        steps = self.step_tokens(run["setting"])
        tokens = sum(run["tokens"][1:]) if run["tokens"] else sum(tokens for tokens, _ in steps[1:])
        # For a contestant that packs its own rows, the share of supervised tokens is taken from the full data.
        share = sum(number for _, number in steps[1:]) / sum(tokens for tokens, _ in steps[1:])
        return tokens / seconds, tokens * share / seconds

    def flops_per_token(self, setting: str) -> float:
        """Model FLOPs per token of the data, by the 4N formula."""
        steps = self.step_tokens(setting)[1:]
        supervised = sum(number for _, number in steps) / sum(tokens for tokens, _ in steps)
        return 4 * (self.work.layer_weights + self.work.head_weights * supervised)

    def table(self, setting: str) -> str:
        """Markdown table of medians, spread and ratios."""
        lines = [
            "| trainer | tokens/s (min to max) | supervised | lit_ft is | MFU | peak memory (of it file pages) "
            "| lit_ft needs | first step | loss differs by |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        peaks = [run["flops_per_second"] for run in self.of(PEAK, setting)]
        reference = self.of("lit_ft", setting)
        for contestant in self.contestants(setting):
            runs = self.of(contestant.key, setting)
            if failed := [run["error"] for run in runs if "error" in run]:
                lines.append(f"| {contestant.name} | did not run: {failed[0]} | | | | | | | |")
            elif runs:
                lines.append(self._line(contestant, runs, reference, max(peaks, default=float("nan"))))
        return "\n".join(lines)

    def _line(self, contestant: Contestant, runs: list[Run], reference: list[Run], peak: float) -> str:
        def median(of: list[Run], key: str) -> float:
            return statistics.median(run[key] for run in of)

        speeds, supervised = zip(*(self.rates(run) for run in runs), strict=True)
        speed, memory = statistics.median(speeds), median(runs, "peak_memory_bytes")
        own = statistics.median(self.rates(run)[0] for run in reference) if reference else float("nan")
        needs = median(reference, "peak_memory_bytes") / memory if reference else float("nan")
        mfu = speed * self.flops_per_token(runs[0]["setting"]) / peak
        difference = loss_difference(runs, reference[0]["losses"]) if reference else "unknown"
        return (
            f"| {contestant.name} | {speed:.0f} ({min(speeds):.0f} to {max(speeds):.0f}) "
            f"| {statistics.median(supervised):.0f} | {own / speed:.2f}x | {mfu:.0%} "
            f"| {memory / 2**30:.2f} GiB ({median(runs, 'file_page_bytes') / 2**30:.2f}) | {needs:.2f}x "
            f"| {median(runs, 'seconds_to_first_step'):.1f} s | {difference} |"
        )


def loss_difference(runs: list[Run], reference: list[float]) -> str:
    """Largest difference of a step's loss or, if the steps have other samples, of a run's mean loss."""
    if all(len(run["losses"]) == len(reference) and run["tokens"] is None for run in runs):
        largest = max(abs(a - b) for run in runs for a, b in zip(run["losses"], reference, strict=True))
        note = f" ({runs[0]['note']})" if runs[0]["note"] else ""
        return f"{largest:.4f}{note}"
    means = [abs(statistics.mean(run["losses"]) - statistics.mean(reference)) for run in runs]
    return f"{max(means):.4f} (of the run's mean: steps hold other samples)"


def environment() -> str:
    """Date, versions and machine, in one line."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "lightning", "transformers", "peft"))
    return f"{date.today()}, {versions}, Python {platform.python_version()}, {_machine()}"


def _machine() -> str:
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").is_file() else ""
    extensions = [name for name in ("avx512_bf16", "amx_bf16") if name in flags]
    return f"{torch.get_num_threads()} threads of {platform.machine()} ({', '.join(extensions) or 'no bf16 units'})"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="qwen2.5-0.5b", help="shape; the weights are random")
    parser.add_argument("--data", default="recipes/data/quickstart_train.json", help="alpaca-style JSON file")
    parser.add_argument("--rows", type=int, default=64, help="rows of the file that are trained on, one epoch")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", help="contestants, by key, with commas")
    parser.add_argument("--setting", choices=SETTINGS, help="one of them; by default all")
    parser.add_argument("--results", type=Path, help="file that every run is added to, and gone on from")
    parser.add_argument("--limit", type=float, default=600, help="seconds that a run may take")
    folder = Path(tempfile.gettempdir()) / "lit_ft_benchmarks"
    parser.add_argument("--folder", type=Path, default=folder, help="where model and rows are kept")
    parser.add_argument("--environments", type=Path, default=folder / "environments", help="folder of the peers'")
    return parser.parse_args(arguments)


def main() -> None:
    """Run the comparison and print tables."""
    options = parse()
    comparison = Comparison(prepare(options.folder, options.model, options.data, options.rows), options)
    print(f"{options.model} (random weights), {options.rows} rows of {Path(options.data).name}\n")
    for setting in [options.setting] if options.setting else SETTINGS:
        comparison.run(setting)
        size, accumulate = SETTINGS[setting]
        tokens = sum(tokens for tokens, _ in comparison.step_tokens(setting)[1:])
        peak, streamed = (
            max((run[name] for run in comparison.of(PEAK, setting)), default=float("nan")) / 1e9
            for name in ("flops_per_second", "streamed_flops_per_second")
        )
        print(f"Micro-batch {size}, accumulate {accumulate}: {tokens:,} tokens timed, {options.rounds} rounds")
        print(f"Peak {peak:.0f} GFLOP/s, {streamed:.0f} where weights come from memory\n")
        print(f"{comparison.table(setting)}\n", flush=True)
    print(environment())


if __name__ == "__main__":
    main()
