"""Host memory of each rank under ModelParallelStrategy, compared with ``lit_ft plan``. Linux only.

    python -m benchmarks.parallel.parallel_memory

Full fine-tuning with AdamW of a model with random weights in fp32, full activation checkpointing, a short row per step.
Memory is the peak of a process after the first step, without mapped files, minus its memory before the model was built.
"""

import argparse
import logging
import os
import sys
import tempfile
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from transformers import Qwen2Config

from benchmarks.compare import environment
from benchmarks.memory.sharded_memory import Watch, own_memory
from benchmarks.parallel.parallel_bytes import LAYOUTS, FixedRows
from benchmarks.ranks import on_ranks
from benchmarks.workload import SHAPES
from lit_ft import CausalLM
from lit_ft.model.loading import decoder_layers
from lit_ft.planning.communication import Step
from lit_ft.planning.memory import Memory, layer_inputs, memory_of
from lit_ft.recipe.trainer_checks import quiet_trainer
from lit_ft.strategies import ModelParallelStrategy

CHOSEN = ("TP2", "TP2 + SP", "PP2", "PP2, ZBVZeroBubble", "DP2", "DP2 x TP2")
RETURN_AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""Settings of malloc that return freed blocks to the system, so that a process holds only the memory that it needs."""


class Measure(Callback):
    """Callback that measures the peak memory after the first step, which creates the optimizer state."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Reset the peak."""
        if batch_idx == 0:
            self.watch = Watch()
        self.watch.take()

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Read the peak and compute the plan."""
        self.gib, strategy = self.watch.take(), trainer.strategy
        assert isinstance(strategy, ModelParallelStrategy)
        layout, base = strategy.layout(), strategy.layout().base
        layers, step = decoder_layers(base), Step(1, batch["input_ids"].shape[1], len(batch["targets"]))
        inputs = layer_inputs(layout, len(layers), base.config.hidden_size, 4, step)
        self.planned = memory_of(
            layout, list(pl_module.parameters()), layers, pl_module.optimizer, inputs, accumulates=False
        )


def measure(folder: str, options: dict[str, Any]) -> tuple[float, Memory]:
    """Measured GiB in addition to the memory before the model was built, and the planned memory, on this rank."""
    before, watch = own_memory(), Measure()
    trainer = quiet_trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=ModelParallelStrategy(**options, timeout=timedelta(seconds=60)),
        max_steps=2,
        gradient_clip_val=1.0,
        callbacks=[watch],
        use_distributed_sampler=False,
    )
    trainer.fit(CausalLM(folder, init="random", dtype="float32", gradient_checkpointing=True), FixedRows())
    return watch.gib - before, watch.planned


def main() -> None:
    """Measure the layouts and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="0.1b")
    options = parser.parse_args()
    if os.environ.get("MALLOC_MMAP_THRESHOLD_") is None:
        command = [sys.executable, "-m", "benchmarks.parallel.parallel_memory", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, **RETURN_AT_ONCE})
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    parts = "weights | gathered | gradients | optimizer | planned, MiB"
    print(f"| layout | rank | {parts} | measured, MiB | ratio |\n|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        Qwen2Config(**SHAPES[options.shape], tie_word_embeddings=False).save_pretrained(Path(folder))
        for name in CHOSEN:
            world, of_strategy = LAYOUTS[name]
            for rank, (gib, planned) in enumerate(on_ranks(world, measure, folder, of_strategy)):
                counts = (planned.weights, planned.gathered, planned.gradients, planned.optimizer, planned.total)
                cells = " | ".join(f"{count / 2**20:,.0f}" for count in counts)
                ratio = gib * 2**30 / planned.total
                print(f"| {name} | {rank} | {cells} | {gib * 1024:,.0f} | {ratio:.2f} |", flush=True)
    print(f"\n{options.shape}, head not tied\n{environment()}")


if __name__ == "__main__":
    main()
