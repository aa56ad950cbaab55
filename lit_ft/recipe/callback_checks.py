"""Checks of a recipe's callbacks before training: what they monitor is logged in time, and files have names.

A schedule that reads a metric is checked too.
"""

import os
import re
import warnings
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from string import Formatter
from typing import NamedTuple

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    EarlyStopping,
    LearningRateFinder,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    SpikeDetection,
    WeightAveraging,
)
from lightning.pytorch.cli import ReduceLROnPlateau
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lit_callbacks import AdapterMerger
from lit_callbacks.internals.lightning_internals import attributes_of
from torch.optim.lr_scheduler import ReduceLROnPlateau as PlainReduceLROnPlateau

from lit_ft.accumulation import accumulation
from lit_ft.checkpointing.selection import POSITIONS
from lit_ft.data.text_data import TextDataModule
from lit_ft.errors import RecipeError
from lit_ft.internals.lightning import validation_interval
from lit_ft.process import data_parallel, datamodule_of
from lit_ft.recipe.allowed_code import is_allowed
from lit_ft.training.causal_lm import CausalLM
from lit_ft.training.metrics import metric_names


def log_own_metrics(parts: Iterable[object]) -> bool:
    """Whether a module or a callback is of a user's own class, which may log metrics under any name."""
    return not all(is_allowed(type(part).__module__) for part in parts)


class LoggedMetrics(NamedTuple):
    """What a recipe logs, as far as it is known before it runs."""

    has_validation: bool
    """Whether there is validation data, and the trainer looks at it."""
    logs_more: bool = False
    """Whether ``log_own_metrics`` holds of the recipe."""
    source_losses: Sequence[str] | None = None
    """Names of the losses of sources; None where they are not known."""
    measured: Sequence[str] = CausalLM.measured
    """What the module measures besides its loss."""
    has_token_weights: bool = False
    """Whether tokens have weights in its training loss."""


def check_callbacks(callbacks: Sequence[Callback], logged: LoggedMetrics) -> None:
    """Refuse callbacks that would end the run at their first look, or take another place than the recipe's.

    Args:
        callbacks: callbacks of the trainer.
        logged: what the recipe logs.

    Raises:
        RecipeError: a metric that ``CausalLM`` does not log is monitored, a file name would be a folder, or a
            learning rate or a checkpoint would come from outside of the recipe and the run folder.
    """
    has_average = any(isinstance(one, WeightAveraging) for one in callbacks)
    for callback in callbacks:
        if has_average and isinstance(callback, AdapterMerger) and callback.on_best:
            raise RecipeError(
                "trainer.callbacks: AdapterMerger's on_best writes the weights of that step, and what is best is their "
                "average; leave on_best out, and after the run: python -m lit_ft export --run RUN --ckpt_path best"
            )
        for kind, why in _REFUSED.items():
            if isinstance(callback, kind):
                raise RecipeError(f"trainer.callbacks: {type(callback).__name__} {why}")
        if isinstance(callback, EarlyStopping | ModelCheckpoint) and callback.monitor is not None:
            who = f"trainer.callbacks: {type(callback).__name__}"
            if not (isinstance(callback, ModelCheckpoint) and callback.monitor in POSITIONS):
                check_monitor(callback.monitor, f"{who} monitors", logged)
            _check_mode(callback.monitor, callback.mode, who)
        if isinstance(callback, ModelCheckpoint) and callback.filename:
            if callback.auto_insert_metric_name:
                _check_filename(callback.filename)
            _check_fields(callback.filename, logged)


_REFUSED: dict[type[Callback], str] = {
    LearningRateFinder: "would train with another learning rate than the recipe's, which a schedule or a resumed run "
    "then takes back; compare some: python -m lit_ft sweep --config RECIPE --vary optimizer.lr=1e-5,1e-4,1e-3",
    OnExceptionCheckpoint: "would start a new run from the checkpoint of another one that failed; take "
    "lightning.pytorch.callbacks.ModelCheckpoint with save_on_exception: true, and resume with --resume auto",
    SpikeDetection: "makes checkpoints that it cannot read again (Lightning 2.6), and lists batches that nothing "
    "leaves out; take lit_callbacks.SpikeGuard, which skips the step of a spike",
}


def check_schedule(schedule: object, logged: LoggedMetrics) -> None:
    """Refuse a ``ReduceLROnPlateau`` that would end the run at the end of its first epoch.

    Args:
        schedule: learning-rate schedule of the recipe, or None.
        logged: what the recipe logs.

    Raises:
        RecipeError: it names no metric, or one that ``CausalLM`` does not log.
    """
    if isinstance(schedule, ReduceLROnPlateau):
        who = "lr_scheduler: ReduceLROnPlateau reads"
        check_monitor(schedule.monitor, who, logged)
    elif isinstance(schedule, PlainReduceLROnPlateau):
        raise RecipeError(
            "lr_scheduler: torch's ReduceLROnPlateau names no metric; write lightning.pytorch.cli.ReduceLROnPlateau "
            "with monitor: val/loss"
        )


def check_monitor(monitor: str, who: str, logged: LoggedMetrics) -> None:
    """Refuse the name of a metric that ``CausalLM`` does not log.

    Args:
        monitor: the name.
        who: who reads it, and how, for the message.
        logged: what the recipe logs.

    Raises:
        RecipeError: it is not logged.
    """
    measured = logged.measured, logged.has_token_weights
    names = [name for split in ("train", "val") for name in metric_names(split, *measured)]
    known = [*names, *(logged.source_losses or ())]
    split, _, rest = monitor.partition("/")
    if split == "val" and not logged.has_validation:
        raise RecipeError(
            f"{who} {monitor!r}, and there is no validation; set data.val_path or data.val_fraction, or take train/loss"
        )
    # Losses of sources, and what other callbacks and modules log, have names of their own.
    may_be_of_source = logged.source_losses is None and rest.startswith("loss/")
    may_be_of_source = may_be_of_source or (rest.startswith("reward/") and "reward" in logged.measured)
    if logged.logs_more or monitor in known or may_be_of_source or (rest and split not in ("train", "val")):
        return
    near = get_close_matches(monitor, known, n=1, cutoff=0.5)
    advice = f"did you mean {near[0]!r}? " if near else ""
    raise RecipeError(
        f"{who} {monitor!r}, which is not logged; {advice}"
        f"There are {', '.join(name for name in known if logged.has_validation or not name.startswith('val'))}"
    )


def losses_of_sources(data: TextDataModule) -> list[str]:
    """Names of the losses of sources that ``CausalLM`` logs with this data."""
    return [f"{split}/loss/{name}" for split in ("train", "val") for name in data.splits.names(split)]


_BETTER = {
    "loss": "min",
    "perplexity": "min",
    "cross_entropy": "min",
    "divergence": "min",
    "token_accuracy": "max",
    "reward": "max",
    "rewards": "max",
    "reward_accuracy": "max",
    "reward_margin": "max",
    "reward_chosen": "max",
    "log_prob_chosen": "max",
}
"""Whether a lower or a higher value of a metric of training or validation is better."""


def _check_mode(monitor: str, mode: str, who: str) -> None:
    """Refuse a mode that takes the worst for the best; Lightning's default is min, whatever is monitored."""
    split, _, name = monitor.partition("/")
    better = _BETTER.get(name.split("/")[0]) if split in ("train", "val") else "max" if monitor in POSITIONS else None
    if better is not None and mode != better:
        raise RecipeError(f"{who} takes the worst {monitor} for the best with mode={mode}; set mode: {better}")


def _check_fields(filename: str, logged: LoggedMetrics) -> None:
    """Refuse a name of a checkpoint that cannot be filled in: Lightning would fail at the first one, or write 0."""
    try:
        names = [name for _, name, _, _ in Formatter().parse(filename) if name is not None]
    except ValueError as error:
        raise RecipeError(
            f"trainer.callbacks: ModelCheckpoint's filename {filename!r} is no pattern ({error}); write e.g. "
            "'{epoch}-{step}'"
        ) from error
    for name in names:
        if name not in POSITIONS:
            who = f"trainer.callbacks: ModelCheckpoint's filename {filename!r} names"
            check_monitor(name, who, logged)


def _check_filename(filename: str) -> None:
    if (metric := re.search(r"\{(\w+/[^:}]*)[^}]*\}", filename)) is not None:
        better = filename.replace(metric[0], f"{metric[1].rpartition('/')[2]}={metric[0]}")
        raise RecipeError(
            f"trainer.callbacks: ModelCheckpoint's filename {filename!r} would be a folder, because the name "
            f"{metric[1]!r} is put before its value; write {better!r} with auto_insert_metric_name: false"
        )


METRIC_VARIABLE = "LIT_FT_METRIC"
"""Environment variable by which ``sweep`` names to its trials the metric that they are compared by."""


class FirstValidationCheck(Callback):
    """Say that a run ends before its first validation, and refuse it where its metrics are needed.

    An ``EarlyStopping`` needs them, and so does a sweep by one of them (``METRIC_VARIABLE``). A callback, because the
    micro-batches of an epoch are known when the data is read and the ranks are placed.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Compare the run's length with its first validation, before any weights are read.

        Raises:
            RecipeError: the run ends first, and an ``EarlyStopping`` or a sweep waits for the validation.
        """
        data = datamodule_of(trainer)
        if stage != "fit" or not isinstance(data, TextDataModule) or data.streaming:
            return
        if not data.splits.validates or trainer.limit_val_batches == 0:
            return
        if (interval := validation_interval(trainer)) is None:  # a time
            return
        batches = data.micro_batches_per_epoch(trainer, data_parallel(trainer).size)
        first = first_validation(interval, trainer.check_val_every_n_epoch, batches)
        length = run_length(trainer.max_steps, trainer.max_epochs or -1, batches, accumulation(trainer, 0))
        if length is not None and length < first:
            option = "max_steps" if trainer.max_steps != -1 else "max_epochs"
            ends = (
                f"trainer.{option}={getattr(trainer, option)} ends the run after {length:,} micro-batches, before its "
                f"first validation after {first:,}"
            )
            advice = _earlier(trainer.check_val_every_n_epoch, length, batches)
            _tell_who_waits(attributes_of(trainer).callbacks, ends, advice)


def _tell_who_waits(callbacks: Iterable[Callback], ends: str, advice: str) -> None:
    """Refuse a run without validation where its metrics are needed; else say that there is none.

    Args:
        callbacks: callbacks of the trainer.
        ends: what ends before what.
        advice: options by which the first validation is within the run.
    """
    metric = os.environ.get(METRIC_VARIABLE, "")
    if metric.startswith("val/"):
        raise RecipeError(f"--metric {metric}: {ends}, so it is never logged; {advice}, or take --metric train/loss")
    checkpoints: list[str] = []
    for one in callbacks:
        if not isinstance(one, EarlyStopping | ModelCheckpoint) or not (one.monitor or "").startswith("val/"):
            continue
        if isinstance(one, ModelCheckpoint):
            checkpoints.append(repr(one.monitor))
        elif one.strict:
            raise RecipeError(
                f"{ends}, so EarlyStopping never reads {one.monitor!r}; {advice}, or leave EarlyStopping out"
            )
    best = f", and ModelCheckpoint saves no best one by {checkpoints[0]}" if checkpoints else ""
    if checkpoints:  # said here, once and in the words of the recipe
        warnings.filterwarnings("ignore", message=r".*could not find the monitored key in the returned metrics")
    rank_zero_info(f"{ends}: there is none{best}; to have one, {advice}")


def first_validation(interval: int | float, every_n_epochs: int | None, batches: int) -> int:
    """Micro-batches of a run until its first validation.

    Args:
        interval: ``trainer.val_check_interval``: micro-batches, or a fraction of an epoch.
        every_n_epochs: ``trainer.check_val_every_n_epoch``; None counts micro-batches over epochs.
        batches: micro-batches of an epoch.
    """
    if every_n_epochs is None:
        return int(interval)
    within = interval if isinstance(interval, int) else max(1, int(batches * interval))
    return (every_n_epochs - 1) * batches + min(batches, within)


def run_length(max_steps: int, max_epochs: int, batches: int, accumulate: int) -> int | None:
    """Micro-batches of a run; None where it has no end.

    Args:
        max_steps: optimizer steps, or -1.
        max_epochs: epochs, or -1.
        batches: micro-batches of an epoch; its last optimizer step may have fewer than ``accumulate``.
        accumulate: micro-batches of an optimizer step.
    """
    lengths: list[int] = []
    if max_steps != -1:
        epochs, steps = divmod(max_steps, -(-batches // accumulate))
        lengths.append(epochs * batches + min(batches, steps * accumulate))
    if max_epochs != -1:
        lengths.append(max_epochs * batches)
    return min(lengths, default=None)


def _earlier(every_n_epochs: int | None, length: int, batches: int) -> str:
    """Advice by which the first validation is within the run."""
    if every_n_epochs is not None and every_n_epochs > 1:
        if length >= batches:
            return f"set trainer.check_val_every_n_epoch={length // batches} or lower"
        return f"set trainer.check_val_every_n_epoch=1 and trainer.val_check_interval={length} or lower"
    return f"set trainer.val_check_interval={length} or lower"
