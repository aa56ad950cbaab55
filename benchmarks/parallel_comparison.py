"""Comparison of two processes with one, for an architecture at tiny size.

Two optimizer steps on rows of unequal length under data, tensor, sequence, pipeline, context and expert parallelism, in
full fine-tuning and with LoRA on all linear layers.
"""

import json
import os
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import deepspeed  # noqa: F401  # once, not in each process that is forked from this one
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
SEQUENCE = "TP with sequence_parallel"
STRATEGIES: Mapping[str, Mapping[str, Callable[[], Any]]] = {
    "data": {
        "DDP": partial(DDPStrategy, timeout=TIMEOUT),
        "FSDP": partial(FSDPStrategy, timeout=TIMEOUT),
        "ZeRO-3": partial(DeepSpeedStrategy, config=_zero_3, timeout=TIMEOUT),
    },
    "tensor": {
        "TP": partial(_split, tensor_parallel_size=2),
        SEQUENCE: partial(_split, tensor_parallel_size=2, sequence_parallel=True),
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

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compute experts one by one in double precision, which torch's grouped product has not."""
        if isinstance(pl_module, CausalLM) and pl_module.spec.base.dtype == "float64":
            pl_module.base_model.set_experts_implementation("eager")

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


@dataclass(frozen=True)
class Case:
    """A strategy of two processes, or one process, and a way to train."""

    kind: str | None
    """Kind of parallelism, a name in ``STRATEGIES``; None trains on one process."""
    name: str
    """Name of the strategy."""
    way: str
    """Name in ``WAYS``."""

    def __str__(self) -> str:
        return f"{self.name}, {self.way}"


_DIFFERS = "differs by "
Trained = tuple[list[tuple[float, float]], dict[str, Tensor]]
"""Losses and gradient norms of the steps, and gradients of the first step."""


class Comparison:
    """Comparison of an architecture on two processes with one.

    Args:
        model: model with the weights to start from.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._files = tempfile.TemporaryDirectory()  # until this is collected
        self._folder = self._files.name
        _write(model, Path(self._folder))
        self._on_one: dict[str, dict[str, Trained]] = {}

    def differences(self, kind: str, without: Collection[str] = ()) -> dict[str, str]:
        """What is wrong under one kind of parallelism: by strategy and way to train, if anything is.

        Args:
            kind: kind of parallelism, a name in ``STRATEGIES``.
            without: names of strategies to leave out.
        """
        cases = [Case(kind, name, way) for name, way in product(STRATEGIES[kind], WAYS) if name not in without]
        found = self._wrong(cases, "float32")
        # Where a model amplifies rounding, there is less of it in double precision; of a fault there is not.
        again = [case for case in cases if found.get(str(case), "").startswith(_DIFFERS) and case.name != "ZeRO-3"]
        for case in again:
            del found[str(case)]
        return found | self._wrong(again, "float64")

    def _wrong(self, cases: Sequence[Case], dtype: str) -> dict[str, str]:
        if not cases:
            return {}
        try:
            if dtype not in self._on_one:
                alone = [Case(None, "one process", way) for way in WAYS]
                (results,) = on_ranks(1, train_each, self._folder, alone, dtype)
                self._on_one[dtype] = dict(zip(WAYS, results, strict=True))
            ranks = on_ranks(2, train_each, self._folder, cases, dtype)
        except ProcessRaisedException as error:
            if len(cases) > 1:  # which of them?
                return {what: how for case in cases for what, how in self._wrong([case], dtype).items()}
            line = str(error).strip().splitlines()[-1].removeprefix("lit_ft.errors.RecipeError: ")
            return {str(cases[0]): line.replace(f"model.pretrained={self._folder!r}", "the model").split("; ")[0]}
        found = {}
        for case, results in zip(cases, zip(*ranks, strict=True), strict=True):
            if (difference := max(_difference(one, self._on_one[dtype][case.way]) for one in results)) > TOLERANCE:
                found[str(case)] = f"{_DIFFERS}{difference:.0e}"
        return found


def _write(model: PreTrainedModel, folder: Path) -> None:
    """Write a model, a tokenizer, and 13 rows of token ids: the second step is short."""
    model.save_pretrained(folder)
    train_tokenizer(["a b"], vocab_size=300).save_pretrained(folder)
    generator = np.random.default_rng(0)
    ids = [generator.integers(5, 250, generator.integers(5, 40)).tolist() for _ in range(13)]
    rows = [{"input_ids": one, "labels": [-100] * (len(one) // 3) + one[len(one) // 3 :]} for one in ids]
    (folder / "rows.json").write_text(json.dumps(rows), encoding="utf-8")


def train_each(folder: str, cases: Sequence[Case], dtype: Any) -> list[Trained]:
    """Train two steps of 8 rows in each case; what is returned of the gradients is what this rank has.

    Args:
        folder: folder of a model with weights, of a tokenizer and of ``rows.json``.
        cases: strategies and ways to train.
        dtype: dtype of the model.
    """
    return [_train(folder, case, dtype) for case in cases]


def _train(folder: str, case: Case, dtype: Any) -> Trained:
    os.environ["PL_GLOBAL_SEED"] = "3"
    record, strategy = Record(), None if case.kind is None else STRATEGIES[case.kind][case.name]()
    trainer = quiet_trainer(
        accelerator="cpu",
        devices=1 if strategy is None else 2,
        strategy=strategy or "auto",
        max_steps=2,
        accumulate_grad_batches=1 if case.kind in ("data", "expert") else 2,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        callbacks=[record],
    )
    module = CausalLM(folder, peft=WAYS[case.way], optimizer=partial(torch.optim.SGD, lr=0.1))
    module.spec = replace(module.spec, base=replace(module.spec.base, dtype=dtype))  # double precision is no option
    trainer.fit(module, TextDataModule(f"{folder}/rows.json", micro_batch_size=4, max_length=96))
    return record.steps, record.gradients


def _difference(found: Trained, wanted: Trained) -> float:
    """Largest relative difference of a loss, a norm, or a gradient, those at least a tenth of the largest of all."""
    pairs = zip(found[0], wanted[0], strict=True)
    differences = [abs(got - want) / want for step, right in pairs for got, want in zip(step, right, strict=True)]
    largest = max(float(gradient.abs().max()) for gradient in wanted[1].values())
    for name in found[1].keys() & wanted[1].keys():  # a stage has gradients of its layers alone
        right = wanted[1][name]
        scale = max(float(right.abs().max()), largest / 10)
        differences.append(float((found[1][name] - right).abs().max()) / scale)
    return max(differences)
