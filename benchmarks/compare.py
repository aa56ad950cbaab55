"""lit_ft against its peers on the same work, in one run.

    python -m benchmarks.compare --data huanhuan.json

Each contestant runs in a process of its own, in alternating order, several rounds; medians are
printed. The work is shown to be equal by the losses of each optimiser step.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.workload import SHAPES, Work, prepare


class Contestant(NamedTuple):
    """A trainer and the weights it holds."""

    runner: str
    weights: str
    name: str


LIT_FT = Contestant("lit_ft", "bfloat16", "lit_ft")
PEERS = [
    Contestant("transformers", "float32", "transformers.Trainer + PEFT, bf16=True"),
    Contestant("transformers", "bfloat16", "transformers.Trainer + PEFT, bf16 weights"),
]
SETTINGS = {"micro-batch 1, accumulate 2": (1, 2), "16 samples a step": (16, 1)}


def run_once(contestant: Contestant, work: Work) -> dict[str, Any]:
    """One run in a fresh process.

    Raises:
        RuntimeError: it failed; with the end of what it wrote.
    """
    command = [
        sys.executable,
        "-m",
        "benchmarks.contestants",
        contestant.runner,
        work.to_json(),
        contestant.weights,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
    raise RuntimeError(f"{contestant.name} failed:\n{done.stderr[-3000:]}")


def compare(work: Work, rounds: int) -> dict[Contestant, list[dict[str, Any]]]:
    """Run all contestants, in turn, in opposite order every other round."""
    results: dict[Contestant, list[dict[str, Any]]] = {contestant: [] for contestant in (LIT_FT, *PEERS)}
    for number in range(rounds):
        for contestant in (LIT_FT, *PEERS) if number % 2 == 0 else (*PEERS[::-1], LIT_FT):
            results[contestant].append(run_once(contestant, work))
            print(
                f"  round {number + 1}: {contestant.name}: {results[contestant][-1]['tokens_per_second']:.0f}",
                file=sys.stderr,
            )
    return results


def table(results: dict[Contestant, list[dict[str, Any]]]) -> str:
    """Medians and ratios as Markdown."""

    def median(contestant: Contestant, key: str) -> float:
        return statistics.median(result[key] for result in results[contestant])

    lines = [
        "| trainer | tokens/s (min to max) | lit_ft is | peak memory | lit_ft needs | largest loss difference |",
        "|---|---|---|---|---|---|",
    ]
    reference = results[LIT_FT][0]["losses"]
    for contestant, runs in results.items():
        speeds = [result["tokens_per_second"] for result in runs]
        speed, memory = median(contestant, "tokens_per_second"), median(contestant, "peak_memory_gib")
        difference = max(abs(a - b) for run in runs for a, b in zip(run["losses"], reference, strict=True))
        lines.append(
            f"| {contestant.name} | {speed:.0f} ({min(speeds):.0f} to {max(speeds):.0f}) "
            f"| {median(LIT_FT, 'tokens_per_second') / speed:.2f}x | {memory:.2f} GiB "
            f"| {median(LIT_FT, 'peak_memory_gib') / memory:.2f}x | {difference:.4f} |"
        )
    return "\n".join(lines)


def environment() -> str:
    """Versions, machine and date in a line."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "lightning", "transformers", "peft"))
    return f"{date.today()}, {versions}, Python {platform.python_version()}, {_cpu()}"


def _cpu() -> str:
    import torch

    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").is_file() else ""
    extensions = [name for name in ("avx512_bf16", "amx_bf16") if name in flags]
    return f"{torch.get_num_threads()} threads of {platform.machine()} ({', '.join(extensions) or 'no bf16 units'})"


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="qwen2.5-0.5b", help="shape; the weights are random")
    parser.add_argument("--data", default="recipes/data/quickstart_train.json", help="alpaca-style JSON file")
    parser.add_argument("--rows", type=int, default=64, help="rows of the file that are trained on, one epoch")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "lit_ft_benchmarks")
    options = parser.parse_args()
    model, data = prepare(options.folder, options.model, options.data, options.rows)
    print(
        f"{options.model} (random weights), {options.rows} rows of {Path(options.data).name}, LoRA r=8 on q/v, bf16\n"
    )
    for setting, (micro_batch_size, accumulate) in SETTINGS.items():
        results = compare(Work(model, data, micro_batch_size, accumulate), options.rounds)
        print(
            f"{setting}, {results[LIT_FT][0]['tokens']:,} tokens timed, {options.rounds} rounds\n\n{table(results)}\n",
            flush=True,
        )
    print(environment())


if __name__ == "__main__":
    main()
