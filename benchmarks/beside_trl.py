"""What the comparisons with TRL's trainers share: options, the model and its adapter, and rounds of runs."""

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from benchmarks.contestants import Contestant
from benchmarks.peers.job import LORA_ALL_LINEAR, Job
from benchmarks.processes import Run, run_contestant
from benchmarks.workload import SHAPES, texts_of, write_model

LIMIT_SECONDS = 1800
"""Seconds that a run may take."""


def parser_of(description: str | None, micro_batch_size: int, max_length: int) -> argparse.ArgumentParser:
    """Parser of the options of all comparisons, with defaults of one."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="recipes/data/quickstart_train.json", help="alpaca-style JSON file")
    parser.add_argument("--environments", type=Path, help="folder of the peers'")
    parser.add_argument("--only", help="keys of contestants, separated by commas")
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--micro-batch-size", type=int, default=micro_batch_size)
    parser.add_argument("--max-length", type=int, default=max_length)
    parser.add_argument("--rounds", type=int, default=1)
    return parser


def write_weights(folder: Path, options: argparse.Namespace) -> tuple[Path, Path, list[dict[str, str]]]:
    """Write a model and an adapter for it; returns their folders, and the rows of the data."""
    rows: list[dict[str, str]] = json.loads(Path(options.data).read_text(encoding="utf-8"))
    model, adapter = folder / "model", folder / "adapter"
    write_model(model, SHAPES[options.shape], texts_of(rows), options.device)
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(model)
    get_peft_model(base, LoraConfig(**LORA_ALL_LINEAR)).save_pretrained(adapter)
    return model, adapter, rows


def write_conversations(path: Path, rows: Sequence[Mapping[str, str]]) -> None:
    """Write alpaca-style rows as conversations of two messages."""
    asked = [(f"{one['instruction']}\n{one.get('input') or ''}", one["output"]) for one in rows]
    conversations = [
        {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]}
        for prompt, answer in asked
    ]
    path.write_text(json.dumps(conversations), encoding="utf-8")


def run_rounds(
    contestants: Sequence[Contestant], job: Job, given: Mapping[str, Any], options: argparse.Namespace, logs: Path
) -> dict[str, list[Run]]:
    """Runs of each contestant by key, each in its own process; every second round is in reverse order.

    Args:
        contestants: contestants to run.
        job: work of all of them.
        given: options of all runners, beside their own.
        options: options of the command line.
        logs: folder for the output of the processes.
    """
    runs: dict[str, list[Run]] = {one.key: [] for one in contestants}
    for number in range(options.rounds):
        for one in contestants if number % 2 == 0 else contestants[::-1]:
            contestant = one._replace(options={**one.options, **given})
            log = logs / f"{one.key}.log"
            found = run_contestant(contestant, job, options.environments, log, LIMIT_SECONDS)
            runs[one.key].append(found)
            said = found.get("error") or f"{seconds_of(found):.1f} s, others took {found['others_share']:.0%}"
            print(f"round {number + 1}: {one.key}: {said}", file=sys.stderr, flush=True)
    return runs


def chosen_of(contestants: Sequence[Contestant], options: argparse.Namespace) -> list[Contestant]:
    """Contestants that the command line selects."""
    return [one for one in contestants if options.only is None or one.key in options.only.split(",")]


def error_of(runs: Sequence[Run]) -> str | None:
    """Reason of the first failure; None if all runs ended well."""
    return next((run["error"] for run in runs if "error" in run), None)


def seconds_of(run: Run) -> float:
    """Seconds from the beginning of training, which is the first of ``ends``, to the end of the last step."""
    return float(run["ends"][-1] - run["ends"][0])


def processor_seconds_of(run: Run) -> float:
    """Seconds that processors have worked for the process meanwhile; NaN on CUDA."""
    ends = run["processor_ends"]
    return float(ends[-1] - ends[0]) if ends else float("nan")


def middle_and_half_range(values: Sequence[float]) -> tuple[float, float]:
    """Median, and half of the difference between the largest and the smallest value."""
    return statistics.median(values), (max(values) - min(values)) / 2


def times_of(runs: Sequence[Run], first: Sequence[Run]) -> str:
    """Cells of a table: seconds of a step and its multiple of that of ``first``, by the clock and of the processor."""
    steps, cells = len(runs[0]["losses"]), []
    for of in (seconds_of, processor_seconds_of):
        middle, spread = middle_and_half_range([of(one) / steps for one in runs])
        compared = float("nan") if error_of(first) else statistics.median(of(one) / steps for one in first)
        cells.append(f"{middle:.2f} (+-{spread:.2f}) | {middle / compared:.2f}x")
    return " | ".join(cells)


def peak_of(runs: Sequence[Run]) -> str:
    """Median of the peak memory, as text."""
    return f"{statistics.median(run['peak_memory_bytes'] for run in runs) / 2**20:,.0f} MiB"
