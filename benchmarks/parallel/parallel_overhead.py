"""Overhead of Lightning and ModelParallelStrategy per optimizer step in one process, compared with a plain loop.

    python -m benchmarks.parallel.parallel_overhead

On CUDA with NCCL if there is a GPU, else on one CPU core with gloo. All contestants train the same model on the same
rows with AdamW and gradient clipping, in alternating rounds. On CUDA, steps are timed by the clock, with a
synchronization only at both ends of a round; on a CPU, by the processor time of the process, which other work on the
machine does not increase.
"""

import argparse
import logging
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from lightning.fabric.plugins.environments.lightning import find_free_network_port
from lightning.pytorch import Callback, Trainer
from torch.utils.data import DataLoader
from transformers import Qwen2Config

from benchmarks.compare import environment
from benchmarks.workload import SHAPES
from lit_ft import CausalLM
from lit_ft.packed_batch import PackedBatch, pack_samples
from lit_ft.recipe.trainer_checks import quiet_trainer
from lit_ft.strategies import ModelParallelStrategy

WARM_UP = 4
"""Number of steps before the timed ones."""


class Clock(Callback):
    """Callback that measures the total time of all steps after the first ``WARM_UP``."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: PackedBatch, batch_idx: int) -> None:
        """Start before the first timed step."""
        if batch_idx == WARM_UP:
            self.seconds = -now()

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Stop."""
        self.seconds += now()


def now() -> float:
    """Seconds of the clock after a synchronization on CUDA, or processor seconds of this process on a CPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def plain(module: CausalLM, rows: list[PackedBatch]) -> float:
    """Seconds of the timed steps in a plain loop."""
    module.configure_model()
    module.to("cuda" if torch.cuda.is_available() else "cpu")
    optimizer, seconds = torch.optim.AdamW(module.parameters(), lr=1e-4), 0.0
    for step, row in enumerate(rows):
        seconds = seconds if step != WARM_UP else -now()
        row = module.transfer_batch_to_device(row, next(module.parameters()).device, 0)
        result = module(row)
        (result.loss_sum / len(row["targets"])).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return seconds + now()


def with_trainer(strategy: Callable[[], Any], module: CausalLM, rows: list[PackedBatch]) -> float:
    """Seconds of the timed steps with Lightning's trainer."""
    clock, some_rows = Clock(), rows
    trainer = quiet_trainer(
        accelerator="cuda" if torch.cuda.is_available() else "cpu",
        devices=1,
        strategy=strategy(),
        max_epochs=1,
        gradient_clip_val=1.0,
        callbacks=[clock],
        use_distributed_sampler=False,
    )
    trainer.fit(module, DataLoader(some_rows, batch_size=None))  # type: ignore[arg-type]
    return clock.seconds


def alone() -> ModelParallelStrategy:
    """``ModelParallelStrategy`` in a process group of one rank."""
    return ModelParallelStrategy(timeout=timedelta(seconds=60))


CONTESTANTS: dict[str, Callable[[CausalLM, list[PackedBatch]], float]] = {
    "plain loop": plain,
    "Trainer": lambda module, rows: with_trainer(lambda: "auto", module, rows),
    "Trainer, ModelParallelStrategy": lambda module, rows: with_trainer(alone, module, rows),
}


def main() -> None:
    """Measure the contestants and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-0.5b" if torch.cuda.is_available() else "0.1b")
    parser.add_argument("--tokens", type=int, default=4096 if torch.cuda.is_available() else 64, help="of a step")
    parser.add_argument("--steps", type=int, default=40 if torch.cuda.is_available() else 12)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    _be_the_only_rank()
    ids = np.random.default_rng(0).integers(3, 1000, options.tokens)
    rows = [pack_samples([(ids, ids)]) for _ in range(options.steps)]
    seconds: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    with tempfile.TemporaryDirectory() as folder:
        Qwen2Config(**SHAPES[options.shape], tie_word_embeddings=True, dtype="bfloat16").save_pretrained(folder)
        for _ in range(options.rounds):
            for name, contestant in CONTESTANTS.items():
                module = CausalLM(folder, init="random", dtype="bfloat16" if torch.cuda.is_available() else "float32")
                seconds[name].append(contestant(module, rows) / (options.steps - WARM_UP))
    base = statistics.median(seconds["plain loop"])
    print("| | ms a step, median of rounds | least | most | over the plain loop |\n|---|---|---|---|---|")
    for name, found in seconds.items():
        middle = statistics.median(found)
        cells = " | ".join(f"{1000 * one:,.1f}" for one in (middle, min(found), max(found)))
        print(f"| {name} | {cells} | {middle / base - 1:+.1%} |")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"\n{options.shape}, {options.tokens} tokens a step, {device}\n{environment()}")


def _be_the_only_rank() -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_network_port())}


if __name__ == "__main__":
    main()
