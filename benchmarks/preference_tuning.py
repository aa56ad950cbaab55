"""Preference tuning beside TRL's DPOTrainer, KTOTrainer, RewardTrainer: losses, and what they take in time and memory.

    python -m benchmarks.peers.environments --root ENVIRONMENTS trl
    python -m benchmarks.preference_tuning --environments ENVIRONMENTS --shape 0.1b --rounds 3
    python -m benchmarks.preference_tuning --environments ENVIRONMENTS --shape 0.1b --rounds 3 --objective kto
    python -m benchmarks.preference_tuning --environments ENVIRONMENTS --shape 0.1b --rounds 3 --objective reward

DPO, KTO or a reward model, by one adapter (LoRA on all linear layers) in float32, on texts made from alpaca-style rows:
the chosen answer is the row's own, the rejected one that of the next row; for KTO every second answer is a rejected
one. The head of a reward model trains beside the adapter, and is the same to begin with. Time is
that from the beginning of training, the reference included, to the end of the last step; each contestant runs in its
own process, in alternating order, and medians are printed. The largest relative difference of a step's loss to lit_ft's
shows that the work is equal; of KTO it holds the estimate of the divergence, for which TRL pairs prompts with other
answers.
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForSequenceClassification

from benchmarks.beside_trl import (
    chosen_of,
    error_of,
    middle_and_half_range,
    parser_of,
    peak_of,
    run_rounds,
    seconds_of,
    write_weights,
)
from benchmarks.compare import environment
from benchmarks.contestants import Contestant
from benchmarks.peers.job import LORA_ALL_LINEAR, Job
from benchmarks.processes import Run

_OURS = Contestant("lit_ft", "lit_ft", "lit_ft_preference", None)
_BEFORE = {"precompute_ref_log_probs": True}
CONTESTANTS = {
    "dpo": [
        _OURS,
        Contestant("trl", "TRL DPOTrainer", "trl_preference", "trl"),
        Contestant("trl_packed", "TRL, padding-free", "trl_preference", "trl", {"padding_free": True}),
        Contestant("trl_before", "TRL, reference before training", "trl_preference", "trl", _BEFORE),
    ],
    "kto": [
        _OURS,
        Contestant("trl", "TRL KTOTrainer", "trl_preference", "trl"),
        Contestant("trl_before", "TRL, reference before training", "trl_preference", "trl", _BEFORE),
    ],
    "reward": [_OURS, Contestant("trl", "TRL RewardTrainer", "trl_preference", "trl")],
}


def prepare(folder: Path, options: argparse.Namespace) -> Job:
    """Write the model, its adapter and the pairs, or an answer of each."""
    model, adapter, rows = write_weights(folder, options)
    if options.objective == "reward":
        _give_score(model, adapter)
    chosen = rows[: options.pairs]
    pairs = [
        {"prompt": f"{one['instruction']}\n{one.get('input') or ''}\n\n", "chosen": one["output"], "rejected": other}
        for one, other in zip(chosen, [row["output"] + "!" for row in [*chosen[1:], chosen[0]]], strict=True)
    ]
    judged = [
        {"prompt": pair["prompt"], "completion": pair["rejected" if n % 2 else "chosen"], "label": n % 2 == 0}
        for n, pair in enumerate(pairs)
    ]
    path = folder / "rows.json"
    path.write_text(json.dumps(judged if options.objective == "kto" else pairs), encoding="utf-8")
    return Job(str(model), str(path), options.micro_batch_size, 1, options.device, options.max_length)


def _give_score(folder: Path, adapter: Path) -> None:
    """Make a reward model of a causal language model in a folder, with an adapter for it."""
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    model.save_pretrained(folder)
    lora = LoraConfig(**{**LORA_ALL_LINEAR, "task_type": "SEQ_CLS"})
    get_peft_model(model, lora).save_pretrained(adapter)


def row_of(name: str, runs: list[Run], losses: list[float], pairs: int) -> str:
    """Row of the table."""
    if error := error_of(runs):
        return f"| {name} | {error} | | | |"
    difference = max(abs(a - b) / b for a, b in zip(runs[0]["losses"], losses, strict=True))
    middle, spread = middle_and_half_range([seconds_of(one) for one in runs])
    return f"| {name} | {middle:.1f} s (+-{spread:.1f}) | {pairs / middle:.2f} | {peak_of(runs)} | {difference:.0e} |"


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = parser_of(__doc__, micro_batch_size=4, max_length=512)
    parser.add_argument("--pairs", type=int, default=32)
    parser.add_argument("--objective", choices=tuple(CONTESTANTS), default="dpo")
    options = parser.parse_args(arguments)
    chosen = chosen_of(CONTESTANTS[options.objective], options)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = prepare(folder, options)
        given = {"adapter": str(folder / "adapter"), "epochs": options.epochs, "objective": options.objective}
        runs = run_rounds(chosen, job, given, options, folder)
    losses, per = runs[chosen[0].key][0].get("losses", []), "answers" if options.objective == "kto" else "pairs"
    print(f"{environment()}\n\n| trainer | time | {per}/s | peak memory | loss differs by |\n|---|---|---|---|---|")
    for one in chosen:
        print(row_of(one.name, runs[one.key], losses, options.pairs * options.epochs))


if __name__ == "__main__":
    main()
