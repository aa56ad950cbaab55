"""Comparison of two processes with one, for an architecture at tiny size: two optimizer steps on rows of unequal length.

Data, tensor, sequence, pipeline, context and expert parallelism, in full fine-tuning and with LoRA on all linear layers.
"""

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from lit_callbacks.distributed.gather import full_tensor
from peft import LoraConfig
from torch import Tensor
from torch.multiprocessing import ProcessRaisedException
from transformers import PreTrainedModel

from benchmarks.ranks import on_ranks
from benchmarks.workload import train_tokenizer
from lit_ft import CausalLM, TextDataModule
from lit_ft.recipe.trainer_checks import quiet_trainer
from lit_ft.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy

TOLERANCE = 1e-5
"""Largest relative difference that is rounding."""
TIMEOUT = timedelta(seconds=60)
"""Of a collective: a rank that waits for one that has failed ends."""
_zero_3 = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
_split = partial(ModelParallelStrategy, timeout=TIMEOUT)
STRATEGIES: Mapping[str, Mapping[str, Callable[[], Any]]] = {
    "data": {
        "DDP": partial(DDPStrategy, timeout=TIMEOUT),
        "FSDP": partial(FSDPStrategy, timeout=TIMEOUT),
        "ZeRO-3": partial(DeepSpeedStrategy, config=_zero_3, timeout=TIMEOUT),
    },
    "tensor": {
        "TP": partial(_split, tensor_parallel_size=2),
        "TP with sequence_parallel": partial(_split, tensor_parallel_size=2, sequence_parallel=True),
    },
    "pipeline": {"PP": partial(_split, pipeline_parallel_size=2)},
    "context": {"CP": partial(_split, context_parallel_size=2)},
    "expert": {"EP": partial(_split, data_parallel_size=2, expert_parallel_size=2)},
}
"""Strategies of two processes, by the kind of parallelism and their names."""
WAYS: Mapping[str, LoraConfig | None] = {
    "full": None,
    "LoRA": LoraConfig(r=4, lora_alpha=1, target_modules="all-linear", init_lora_weights=False),
}


class Record(Callback):
    """Loss and gradient norm of each optimizer step, and gradients of the first one."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, float]] = []
        self.gradients: dict[str, Tensor] = {}

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Keep gradients, which DeepSpeed does not show here."""
        if not self.steps:
            gradients = {name: p.grad for name, p in pl_module.named_parameters() if p.grad is not None}
            self.gradients = {name: full_tensor(gradient).clone() for name, gradient in gradients.items()}

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Keep what a step has logged."""
        metrics = trainer.callback_metrics
        if trainer.global_step > len(self.steps):
            self.steps.append((float(metrics["train/loss"]), float(metrics["train/grad_norm"])))


Trained = tuple[list[tuple[float, float]], dict[str, Tensor]]
"""Losses and gradient norms of the steps, and gradients of the first step."""


def differences(model: PreTrainedModel, kind: str) -> dict[str, str]:
    """What is wrong with an architecture under one kind of parallelism: by strategy and way to train, if anything is.

    Args:
        model: model with the weights to start from.
        kind: kind of parallelism, a name in ``STRATEGIES``.
    """
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        _write(model, Path(folder))
        for way in WAYS:
            (one,) = on_ranks(1, train, folder, way)
            for name in STRATEGIES[kind]:
                try:
                    ranks = on_ranks(2, train, folder, way, kind, name)
                except ProcessRaisedException as error:
                    found[f"{name}, {way}"] = str(error).strip().splitlines()[-1]
                    continue
                if (difference := max(_difference(rank, one) for rank in ranks)) > TOLERANCE:
                    found[f"{name}, {way}"] = f"differs by {difference:.0e}"
                elif missing := one[1].keys() - {part for _, gradients in ranks for part in gradients}:
                    found[f"{name}, {way}"] = f"no gradient of {min(missing)}"
    return found


def _write(model: PreTrainedModel, folder: Path) -> None:
    """Write a model, a tokenizer, and 13 rows of token ids: the second step is short."""
    model.save_pretrained(folder)
    train_tokenizer(["a b"], vocab_size=300).save_pretrained(folder)
    generator = np.random.default_rng(0)
    ids = [generator.integers(5, 250, generator.integers(5, 40)).tolist() for _ in range(13)]
    rows = [{"input_ids": one, "labels": [-100] * (len(one) // 3) + one[len(one) // 3 :]} for one in ids]
    (folder / "rows.json").write_text(json.dumps(rows), encoding="utf-8")


def train(folder: str, way: str, kind: str | None = None, name: str | None = None) -> Trained:
    """Train two steps of 8 rows; what is returned of the gradients is what this rank has.

    Args:
        folder: folder of a model with weights, of a tokenizer and of ``rows.json``.
        way: way to train, a name in ``WAYS``.
        kind: kind of parallelism; None trains on one process.
        name: name of the strategy.
    """
    os.environ["PL_GLOBAL_SEED"] = "3"
    record, is_single = Record(), kind is None or name is None
    trainer = quiet_trainer(
        accelerator="cpu",
        devices=1 if is_single else 2,
        strategy="auto" if is_single else STRATEGIES[kind][name](),
        max_steps=2,
        accumulate_grad_batches=1 if kind in ("data", "expert") else 2,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        callbacks=[record],
    )
    module = CausalLM(folder, peft=WAYS[way], optimizer=partial(torch.optim.SGD, lr=0.1))
    trainer.fit(module, TextDataModule(f"{folder}/rows.json", micro_batch_size=4, max_length=96))
    return record.steps, record.gradients


def _difference(found: Trained, wanted: Trained) -> float:
    """Largest relative difference of a loss, a norm, or a gradient, those at least a tenth of the largest of all."""
    pairs = zip(found[0], wanted[0], strict=True)
    differences = [abs(got - want) / want for step, right in pairs for got, want in zip(step, right, strict=True)]
    largest = max(float(gradient.abs().max()) for gradient in wanted[1].values())
    for name in found[1].keys() & wanted[1].keys():
        right = wanted[1][name]
        scale = max(float(right.abs().max()), largest / 10)
        differences.append(float((found[1][name] - right).abs().max()) / scale)
    return max(differences)
