"""Fits that are stopped at a given moment and resumed, and a plain training loop over the same samples."""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from lit_ft import CausalLM, TextDataModule
from lit_ft.data.loaders.mixing import Mixing
from lit_ft.data.loaders.streaming import MixedRows
from lit_ft.data.text.sources import Source
from lit_ft.gradient_norm import local

LEARNING_RATE = 0.02
SEED = 3


@dataclass
class Run:
    """Data and settings of a fit; ``sources`` are JSON-lines files with their number of rows."""

    model: str
    sources: list[tuple[str, int]]
    val_path: str | None = None
    ranks: int = 1
    strategy: Callable[[], Any] | None = None
    """Factory of the strategy for several ranks; None is DDP."""
    data: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    schedule: dict[int, int] | None = None
    """Gradient accumulation factor by epoch."""

    def module_and_data(self) -> tuple[CausalLM, TextDataModule]:
        module = CausalLM(self.model)
        module.optimizer = lambda parameters: torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=0.5)
        sources = [Source(path, name=f"s{number}") for number, (path, _) in enumerate(self.sources)]
        if self.data.get("mixing", "concatenate") != "concatenate":
            sources = [replace(source, weight=float(number + 1)) for number, source in enumerate(sources)]
        options = {"micro_batch_size": 2, "max_length": 64, "tokenize_workers": 0, **self.data}
        if not options.get("streaming"):
            options.pop("shuffle_buffer", None)  # of the cases that stream
        return module, TextDataModule(sources=sources, val_path=self.val_path, **options)

    def fit(
        self,
        folder: Path,
        stop: "Stop | None" = None,
        ckpt_path: str | None = None,
        resume_data: Any = "same",
        **trainer: Any,
    ) -> "Outcome":
        """Train in this process, one rank of ``ranks``."""
        os.environ["PL_GLOBAL_SEED"] = str(SEED)
        module, data = self.module_and_data()
        data.resume_data = resume_data
        watch, logged = Watch(), Logged()
        callbacks: list[Callback] = [watch]
        if self.schedule:
            callbacks.append(GradientAccumulationScheduler(dict(self.schedule)))
        options = {
            "accelerator": "cpu",
            "devices": self.ranks,
            "strategy": self.strategy() if self.strategy else "ddp" if self.ranks > 1 else "auto",
            "logger": logged,
            "log_every_n_steps": 1,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
            "default_root_dir": folder,
            **self.trainer,
            **trainer,
        }
        fit = Trainer(callbacks=[*callbacks, *([stop] if stop else [])], **options)
        try:
            fit.fit(module, data, ckpt_path=ckpt_path)
        except Stopped:
            assert stop is not None
        weights = {name: local(p.detach()).clone() for name, p in module.trainable_parameters().items()}
        return Outcome(
            weights, watch.losses, watch.norms, watch.validations, fit.current_epoch, fit.global_step, logged.losses
        )


@dataclass
class Outcome:
    weights: dict[str, Tensor]
    """This rank's shards of the weights."""
    losses: dict[int, float]
    """Loss of each optimizer step of this process, by its number from 1."""
    norms: dict[int, float]
    validations: list[tuple[int, float]]
    """Number of optimizer steps before each validation, and its loss."""
    epoch: int
    step: int
    logged: dict[tuple[str, int], float]
    """Logged losses by name and step."""


class Logged(DummyLogger):
    """Logger that stores the losses."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: dict[tuple[str, int], float] = {}

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        assert step is not None
        self.losses |= {(name, step): metrics[name] for name in ("train/loss", "val/loss") if name in metrics}


class Watch(Callback):
    def __init__(self) -> None:
        self.losses: dict[int, float] = {}
        self.norms: dict[int, float] = {}
        self.validations: list[tuple[int, float]] = []
        self._step = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._step = trainer.global_step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step > self._step:
            self._step = trainer.global_step
            metrics = trainer.callback_metrics
            self.losses[self._step] = float(metrics["train/loss"])
            self.norms[self._step] = float(metrics["train/grad_norm"])

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.validations.append((trainer.global_step, float(trainer.callback_metrics["val/loss"])))


class Stopped(Exception):
    pass


class Stop(Callback):
    """Callback that saves a checkpoint at a given moment and ends the run."""

    def __init__(self, moment: str, number: float, path: Path) -> None:
        """Set the moment.

        Args:
            moment: ``batch``, ``backward``, ``validation``, ``validation_batch``, ``should_stop`` or ``max_time``.
            number: number of the moment, counted from 1; for ``max_time``, seconds of each micro-batch.
            path: path of the checkpoint.
        """
        self.moment, self.left, self.path, self._saves_at_end = moment, number, str(path), False

    def _count(self, trainer: Trainer, moment: str) -> bool:
        if moment != self.moment:
            return False
        self.left -= 1
        return self.left == 0

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if self._count(trainer, "batch"):  # as train_time_interval and SLURM do
            trainer.save_checkpoint(self.path)
            raise Stopped
        if self._count(trainer, "should_stop"):  # as early stopping does
            trainer.should_stop = self._saves_at_end = True
        if self.moment == "max_time":
            time.sleep(self.left)

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        if self._saves_at_end or (self.moment == "max_time" and trainer.should_stop):
            trainer.save_checkpoint(self.path)
            raise Stopped

    def on_before_backward(self, trainer: Any, *_: Any) -> None:
        if self._count(trainer, "backward"):
            raise Stopped

    def on_validation_batch_end(self, trainer: Any, *_: Any) -> None:
        if self._count(trainer, "validation_batch"):
            raise Stopped

    def on_validation_end(self, trainer: Any, *_: Any) -> None:
        if self._count(trainer, "validation"):  # as ModelCheckpoint does
            trainer.save_checkpoint(self.path)
            raise Stopped

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if self.moment in ("backward", "validation_batch") and isinstance(exception, Stopped):
            trainer.save_checkpoint(self.path)


# --- the plain loop --------------------------------------------------------------------------------


def plain_losses(run: Run, epochs: int) -> tuple[dict[int, float], dict[str, Tensor]]:
    """Loss of each optimizer step and final weights of a loop over single samples, without Lightning."""
    model = AutoModelForCausalLM.from_pretrained(run.model, dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.5)
    losses: dict[int, float] = {}
    for step in steps_of(run, epochs):
        samples = [(torch.tensor(ids[None]).long(), torch.tensor(labels[None]).long()) for ids, labels in step]
        tokens = sum(int((labels[:, 1:] != -100).sum()) for _, labels in samples)
        total = 0.0
        for ids, labels in samples:
            logits = model(input_ids=ids).logits[:, :-1].flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / tokens
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        losses[len(losses) + 1] = total
        if len(losses) == run.trainer.get("max_steps", -1):
            break
    return losses, {f"model.{name}": p.detach() for name, p in model.named_parameters()}


def steps_of(run: Run, epochs: int) -> Iterator[list[Any]]:
    """Samples of each optimizer step."""
    _, data = run.module_and_data()
    limit: Any = run.trainer.get("overfit_batches") or run.trainer.get("limit_train_batches", 1.0)
    per_batch = data.micro_batch_size * run.ranks
    os.environ["PL_GLOBAL_SEED"] = str(SEED)
    passes = units_of(run, data)
    stream: list[Any] = []
    for epoch in range(epochs):
        accumulate = run.trainer.get("accumulate_grad_batches", 1)
        for first, factor in sorted((run.schedule or {}).items()):
            accumulate = factor if epoch >= first else accumulate
        if run.trainer.get("overfit_batches"):
            passes, stream = units_of(run, data), []
        if not stream:
            stream = next(passes)
        batches = -(-len(stream) // per_batch)
        cut = min(batches, limit) if isinstance(limit, int) else int(batches * limit)
        units, rest = stream[: cut * per_batch], stream[cut * per_batch :]
        stream = rest if data.streaming else []
        for start in range(0, len(units), per_batch * accumulate):
            yield [sample for unit in units[start : start + per_batch * accumulate] for sample in unit]


def units_of(run: Run, data: TextDataModule) -> Iterator[list[Any]]:
    """Units of each pass over the data, each a list of samples."""
    data.load(AutoTokenizer.from_pretrained(run.model))
    plan = data.plan(run.ranks)
    if run.trainer.get("overfit_batches"):
        plan = replace(plan, shuffle=False)
    epoch = 0
    while True:
        if not data.streaming:
            samples = data.splits["train"]
            yield [[samples[i] for i in unit] for unit in plan.units(samples, epoch)]
        else:
            yield _streamed(run, data, plan, epoch)
        epoch += 1


def _streamed(run: Run, data: TextDataModule, plan: Any, epoch: int) -> list[Any]:
    """A pass in buffers; samples that do not fill an optimizer step are the first of the next buffer, unshuffled."""
    _, whole = replace(run, data={**run.data, "streaming": False}).module_and_data()
    whole.load(AutoTokenizer.from_pretrained(run.model))
    samples = whole.splits["train"]
    place = {(int(samples.source[i]), int(samples.rows[i])): i for i in range(len(samples))}
    read = [0] * len(data.splits.sources["train"])
    order = []
    for number, *_ in MixedRows(data.splits.sources["train"], data.mixing):
        order.append(place[number, read[number] % run.sources[number][1]])
        read[number] += 1
    units = []
    for buffer, start in enumerate(range(0, len(order), data.shuffle_buffer)):
        fresh = samples.take(torch.tensor(order[start : start + data.shuffle_buffer]).numpy())
        dealt = replace(plan, mixing=Mixing()).units(fresh, epoch, buffer)
        units += [[fresh[i] for i in unit] for unit in dealt]
    return units
