"""Bytes that ranks send under ModelParallelStrategy, counted and compared with ``strategy.describe()``.

    python -m benchmarks.parallel.parallel_bytes

One optimizer step of a small model with random weights, in processes on this machine. A dispatch mode intercepts every
collective and every point-to-point message; collectives are counted as ring algorithms.
"""

import argparse
import logging
import os
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningDataModule, Trainer
from peft import LoraConfig
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader
from transformers import Qwen2Config

from benchmarks.compare import environment
from benchmarks.ranks import on_ranks
from lit_ft import CausalLM
from lit_ft.packed_batch import PackedBatch, pack_samples
from lit_ft.planning import communication_formulas
from lit_ft.planning.communication import Communication, Step
from lit_ft.recipe.trainer_checks import quiet_trainer
from lit_ft.strategies import ModelParallelStrategy

P, T, D, C = "pipeline_parallel_size", "tensor_parallel_size", "data_parallel_size", "context_parallel_size"
SEQUENCE: dict[str, Any] = {"sequence_parallel": True}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "TP2": (2, {T: 2}),
    "TP2, whole logits": (2, {T: 2, "loss_parallel": False}),
    "TP2 + SP": (2, {T: 2, **SEQUENCE}),
    "PP2": (2, {P: 2}),
    "PP2, ZBVZeroBubble": (2, {P: 2, "schedule": "ZBVZeroBubble"}),
    "DP2": (2, {D: 2}),
    "CP2": (2, {C: 2}),
    "DP2 x TP2": (4, {D: 2, T: 2}),
    "DP2 x TP2 x PP2": (8, {D: 2, T: 2, P: 2}),
    "DP2 x TP2 x PP2 + SP": (8, {D: 2, T: 2, P: 2, **SEQUENCE}),
}
SAMPLES, LENGTH = 4, 32


class CountBytes(TorchDispatchMode):
    """Context manager that counts the bytes that this process sends, by the ranks of the process group.

    A collective is counted as a ring algorithm; a receive is not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent: dict[tuple[int, ...], float] = defaultdict(float)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count an operation and run it."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor calls again with operations on local tensors
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count(func._schema.name.split("::")[1].strip("_"), args)
        return result

    def _count(self, name: str, args: Sequence[Any]) -> None:
        if (ranks := ranks_of(args)) is None:
            return
        tensors = [size for arg in args for size in _sizes(arg)]
        if name in ("all_reduce", "allreduce"):
            self.sent[ranks] += communication_formulas.reduced(sum(tensors), len(ranks))
        elif name == "all_gather_into_tensor":
            self.sent[ranks] += communication_formulas.gathered(tensors[0] * len(ranks), len(ranks))
        elif name in ("reduce_scatter_tensor", "allgather_base"):
            self.sent[ranks] += communication_formulas.gathered(tensors[0], len(ranks))
        elif name == "reduce_scatter_base":
            self.sent[ranks] += communication_formulas.gathered(tensors[1], len(ranks))
        elif name in ("send", "broadcast"):
            self.sent[ranks] += sum(tensors)


def ranks_of(args: Sequence[Any]) -> tuple[int, ...] | None:
    """Ranks of the process group among an operation's arguments; None if there is none."""
    for arg in args:
        if isinstance(arg, str):
            try:
                return tuple(dist.get_process_group_ranks(dist.distributed_c10d._resolve_process_group(arg)))  # type: ignore[arg-type]
            except (KeyError, RuntimeError, ValueError):
                continue  # not a group, but the name of a reduction
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            return tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(arg)))
    return None


def _sizes(arg: Any) -> list[int]:
    if isinstance(arg, Tensor):
        return [arg.numel() * arg.element_size()]
    return [size for part in arg for size in _sizes(part)] if isinstance(arg, list | tuple) else []


class FixedRows(LightningDataModule):
    """Data module with the same packed batch in each step: samples of one length, all tokens supervised."""

    micro_batch_size = SAMPLES

    def train_dataloader(self) -> DataLoader:
        """Two steps of the packed batch."""
        ids = [np.random.default_rng(seed).integers(3, 250, LENGTH) for seed in range(SAMPLES)]
        rows: Any = [pack_samples([(one, one) for one in ids])] * 2
        return DataLoader(rows, batch_size=None)


class Measure(Callback):
    """Callback that counts the bytes of the second step and plans them; the first step has one-time communication."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: PackedBatch, batch_idx: int) -> None:
        """Start to count."""
        self.count = CountBytes()
        self.count.__enter__()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: PackedBatch, batch_idx: int
    ) -> None:
        """Sum the bytes along each dimension of the mesh."""
        self.count.__exit__(None, None, None)
        strategy: Any = trainer.strategy
        step = Step(1, batch["input_ids"].shape[1], len(batch["targets"]))
        planned = Communication(strategy.layout(), list(pl_module.parameters()), step).by_dimension()
        self.planned, groups = _by_group(planned, strategy.device_mesh)
        self.sent = {name: self.count.sent.get(ranks, 0.0) for name, ranks in groups.items()}


def _by_group(planned: dict[str, float], mesh: Any) -> tuple[dict[str, float], dict[str, tuple[int, ...]]]:
    """Join the dimensions of the mesh with the same ranks, whose bytes cannot be told apart."""
    spans = {"data": ("data_parallel", "context_parallel")}
    ranks = {name: _along(mesh, spans.get(name, (f"{name}_parallel",))) for name in planned}
    names: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for name, group in ranks.items():
        names[group].append(name)
    joined = {" + ".join(kinds): sum(planned[kind] for kind in kinds) for kinds in names.values()}
    return joined, {" + ".join(kinds): group for group, kinds in names.items()}


def _along(mesh: Any, names: Sequence[str]) -> tuple[int, ...]:
    """Ranks of this rank's group along some dimensions of the mesh."""
    here = mesh.get_coordinate()
    index = tuple(slice(None) if name in names else at for name, at in zip(mesh.mesh_dim_names, here, strict=True))
    return tuple(mesh.mesh[index].flatten().tolist())


def measure(folder: str, options: dict[str, Any], model: dict[str, Any]) -> tuple[dict[str, float], dict[str, float]]:
    """Counted and planned bytes along each dimension of the mesh in one optimizer step, on this rank.

    Args:
        folder: folder of the model's config.
        options: arguments of ``ModelParallelStrategy``.
        model: arguments of ``CausalLM``.
    """
    watch = Measure()
    trainer = quiet_trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=ModelParallelStrategy(**options, timeout=timedelta(seconds=60)),
        max_steps=2,
        use_distributed_sampler=False,
        callbacks=[watch],
    )
    trainer.fit(CausalLM(folder, init="random", **model), FixedRows())
    return watch.sent, watch.planned


def save_config(folder: Path) -> str:
    """Write the config of a small Qwen2, 4 layers of width 64 with tied embeddings of 256 tokens."""
    Qwen2Config(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        dtype="float32",
    ).save_pretrained(folder)
    return str(folder)


WAYS: dict[str, dict[str, Any]] = {
    "LoRA": {"peft": LoraConfig(r=4, target_modules="all-linear")},
    "full": {},
    "full, checkpointing": {"gradient_checkpointing": True},
}


def main() -> None:
    """Measure the layouts and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--layouts", default=";".join(LAYOUTS), help="names of LAYOUTS, between semicolons")
    parser.add_argument("--ways", default=";".join(WAYS), help="names of WAYS, between semicolons")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    print("| layout | trained | along | formula, bytes of rank 0 | counted | worst ratio of all ranks |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        save_config(Path(folder))
        for name in options.layouts.split(";"):
            for way in options.ways.split(";"):
                world, of_strategy = LAYOUTS[name]
                print_rows(name, way, on_ranks(world, measure, folder, of_strategy, WAYS[way]))
    print(f"\n{environment()}")


def print_rows(name: str, way: str, ranks: list[Any]) -> None:
    """Print one line per dimension of the mesh."""
    sent, planned = ranks[0]
    for kind in planned:
        ratios = [counted[kind] / formula[kind] for counted, formula in ranks]
        worst = max(ratios, key=lambda ratio: abs(ratio - 1))
        print(f"| {name} | {way} | {kind} | {planned[kind]:,.0f} | {sent[kind]:,.0f} | {worst:.4f} |", flush=True)


if __name__ == "__main__":
    main()
