"""Effect of the fragments of recipes/speed on tokens/s, memory and the time to the first step.

    python -m benchmarks.speed.speed_fragments --data huanhuan.json

The setting is that of recipes/qwen.yaml (micro-batch 1, accumulate 2, LoRA r=8 on q and v, bf16) without dropout, on
random weights. Each run has its own process, in alternating order; losses are compared step by step with the run
without a fragment.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from benchmarks.compare import environment
from benchmarks.peers.job import LORA
from benchmarks.workload import MAX_LENGTH, SHAPES, prepare

SPEED = Path("recipes/speed")
BASELINES: dict[str, dict[str, Any]] = {"without": {}, "gradient_checkpointing": {"gradient_checkpointing": True}}
WARM_UP = 8
"""Number of untimed optimizer steps: after them every shape of a row has been compiled."""


def options_of(name: str) -> dict[str, Any]:
    """Options of the model for a fragment or for a run that it is compared with."""
    return BASELINES[name] if name in BASELINES else yaml.safe_load((SPEED / f"{name}.yaml").read_text())["model"]


def run(model: str, rows: str, name: str) -> dict[str, Any]:
    """Train for one epoch."""
    import torch
    from lightning.pytorch import Callback, Trainer, seed_everything
    from peft import LoraConfig

    from benchmarks.memory.sharded_memory import Watch
    from lit_ft import CausalLM, TextDataModule
    from lit_ft.recipe.trainer_checks import quiet_trainer

    class Clock(Callback):
        def __init__(self) -> None:
            self.ends: list[float] = []
            self.losses: list[float] = []

        def on_train_start(self, trainer: Trainer, *_: Any) -> None:
            self.start = time.perf_counter()

        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            if trainer.global_step > len(self.ends):
                self.ends.append(time.perf_counter())
                self.losses.append(float(trainer.callback_metrics["train/loss"]))

    seed_everything(0, verbose=False)
    clock, watch = Clock(), Watch()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    data = TextDataModule(rows, micro_batch_size=1, max_length=MAX_LENGTH, shuffle=False)
    trainer = quiet_trainer(accelerator=device, devices=1, max_epochs=1, accumulate_grad_batches=2, callbacks=[clock])
    trainer.fit(CausalLM(model, dtype="bfloat16", peft=LoraConfig(**LORA), **options_of(name)), data)
    tokens = int(data.splits["train"].lengths[2 * WARM_UP :].sum())
    return {
        "first_step": clock.ends[0] - clock.start,
        "warm_up": clock.ends[WARM_UP - 1] - clock.start,
        "tokens_per_second": tokens / (clock.ends[-1] - clock.ends[WARM_UP - 1]),
        "gib": torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else watch.take(),
        "losses": clock.losses,
    }


def in_a_process(model: str, rows: str, name: str) -> dict[str, Any]:
    """``run`` in a new process, with kernels compiled anew."""
    with tempfile.TemporaryDirectory() as cache:
        environ = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
        command = [sys.executable, "-m", "benchmarks.speed.speed_fragments", "--child", model, rows, name]
        done = subprocess.run(command, env=environ, capture_output=True, text=True)
    lines = [line.removeprefix("RESULT ") for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise RuntimeError(f"{name} failed:\n{done.stderr[-2000:]}")
    return json.loads(lines[0])


def median(runs: list[dict[str, Any]], key: str) -> float:
    """Median of a measurement over runs."""
    return statistics.median(result[key] for result in runs)


def main() -> None:
    """Run the fragments and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", choices=SHAPES, default="qwen2.5-0.5b")
    parser.add_argument("--data", default="recipes/data/quickstart_train.json", help="alpaca-style JSON file")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--names", default="without,compile,gradient_checkpointing,activation_offload")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "lit_ft_benchmarks")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(f"RESULT {json.dumps(run(*options.child))}")
        return
    work = prepare(options.folder, options.model, options.data, options.rows)
    names = options.names.split(",")
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for number in range(options.rounds):
        for name in names if number % 2 == 0 else names[::-1]:
            runs[name].append(in_a_process(str(work.model), str(work.rows), name))
    first = runs[names[0]]
    print(
        "| run | tokens/s (least to most) | of the first run's | first step, s | first 8 steps, s | memory, GiB "
        "| largest loss difference |\n|---|---|---|---|---|---|---|"
    )
    for name, of in runs.items():
        rates = [result["tokens_per_second"] for result in of]
        difference = max(abs(a - b) for one in of for a, b in zip(one["losses"], first[0]["losses"], strict=True))
        print(
            f"| {name} | {statistics.median(rates):.0f} ({min(rates):.0f} to {max(rates):.0f}) "
            f"| {statistics.median(rates) / median(first, 'tokens_per_second'):.2f}x | {median(of, 'first_step'):.1f} "
            f"| {median(of, 'warm_up'):.1f} | {median(of, 'gib'):.2f} | {difference:.4f} |",
            flush=True,
        )
    print(
        f"\n{options.model}, {options.rows} rows of {Path(options.data).name}, {options.rounds} rounds\n{environment()}"
    )


if __name__ == "__main__":
    main()
