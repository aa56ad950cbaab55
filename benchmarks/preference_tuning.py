"""Preference tuning beside TRL's DPOTrainer: the same losses, and what they take in time and memory.

    python -m benchmarks.peers.environments --root ENVIRONMENTS trl
    python -m benchmarks.preference_tuning --environments ENVIRONMENTS --shape 0.1b --rounds 3

DPO of one adapter (LoRA on all linear layers) in float32, on pairs of texts made from alpaca-style rows: the chosen
answer is the row's own, the rejected one that of the next row. Time is that from the beginning of training, the
reference included, to the end of the last step; each contestant runs in its own process, in alternating order, and
medians are printed. The largest relative difference of a step's loss to lit_ft's shows that the work is equal.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from benchmarks.compare import environment
from benchmarks.contestants import Contestant
from benchmarks.peers.job import LORA_ALL_LINEAR, Job
from benchmarks.processes import Run, run_contestant
from benchmarks.workload import SHAPES, texts_of, write_model

CONTESTANTS = [
    Contestant("lit_ft", "lit_ft", "lit_ft_dpo", None),
    Contestant("trl", "TRL DPOTrainer", "trl_dpo", "trl"),
    Contestant("trl_packed", "TRL, padding-free", "trl_dpo", "trl", {"padding_free": True}),
    Contestant("trl_before", "TRL, reference before training", "trl_dpo", "trl", {"precompute_ref_log_probs": True}),
]


def prepare(folder: Path, options: argparse.Namespace) -> Job:
    """Write the model, its adapter and the pairs."""
    rows = json.loads(Path(options.data).read_text(encoding="utf-8"))
    model = folder / "model"
    write_model(model, SHAPES[options.shape], texts_of(rows), options.device)
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(model)
    get_peft_model(base, LoraConfig(**LORA_ALL_LINEAR)).save_pretrained(folder / "adapter")
    chosen = rows[: options.pairs]
    pairs = [
        {"prompt": f"{one['instruction']}\n{one.get('input') or ''}\n\n", "chosen": one["output"], "rejected": other}
        for one, other in zip(chosen, [row["output"] + "!" for row in [*chosen[1:], chosen[0]]], strict=True)
    ]
    path = folder / "pairs.json"
    path.write_text(json.dumps(pairs), encoding="utf-8")
    return Job(str(model), str(path), options.micro_batch_size, 1, options.device, options.max_length)


def run(job: Job, contestant: Contestant, options: argparse.Namespace, adapter: Path) -> Run:
    """Measurements of one run of a contestant."""
    epochs = "epochs" if contestant.key == "lit_ft" else "num_train_epochs"
    given = {**contestant.options, "adapter": str(adapter), epochs: options.epochs}
    log = adapter.with_name(f"{contestant.key}.log")
    return run_contestant(contestant._replace(options=given), job, options.environments, log, limit_seconds=1800)


def row_of(name: str, runs: list[Run], losses: list[float], pairs: int) -> str:
    """Row of the table."""
    if errors := [one["error"] for one in runs if "error" in one]:
        return f"| {name} | {errors[0]} | | | |"
    seconds = [one["ends"][-1] - one["ends"][0] for one in runs]
    peak = statistics.median(one["peak_memory_bytes"] for one in runs) / 2**20
    difference = max(abs(a - b) / b for a, b in zip(runs[0]["losses"], losses, strict=True))
    middle, spread = statistics.median(seconds), max(seconds) - min(seconds)
    return (
        f"| {name} | {middle:.1f} s (+-{spread / 2:.1f}) | {pairs / middle:.2f} | {peak:,.0f} MiB | {difference:.0e} |"
    )


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="recipes/data/quickstart_train.json")
    parser.add_argument("--environments", type=Path)
    parser.add_argument("--only", help="keys of contestants, separated by commas")
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--pairs", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--micro-batch-size", type=int, default=4)
    parser.add_argument("--max-length", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args(arguments)
    chosen = [one for one in CONTESTANTS if options.only is None or one.key in options.only.split(",")]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = prepare(folder, options)
        runs: dict[str, list[Run]] = {one.key: [] for one in chosen}
        for _ in range(options.rounds):
            for one in chosen:
                runs[one.key].append(run(job, one, options, folder / "adapter"))
    losses = runs[chosen[0].key][0].get("losses", [])
    print(f"{environment()}\n\n| trainer | time | pairs/s | peak memory | loss differs by |\n|---|---|---|---|---|")
    for one in chosen:
        print(row_of(one.name, runs[one.key], losses, options.pairs * options.epochs))


if __name__ == "__main__":
    main()
