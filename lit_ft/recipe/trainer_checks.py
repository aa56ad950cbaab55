"""Arguments of Lightning's ``Trainer`` in a recipe, which ``Trainer`` itself checks."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from inspect import signature
from typing import Any

import torch
from jsonargparse import Namespace
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lit_ft.data.text_data import TextDataModule
from lit_ft.errors import RecipeError
from lit_ft.recipe.other_trainers import CLASSES
from lit_ft.recipe.value_errors import shortened
from lit_ft.run.time_limit import MaxTime, duration
from lit_ft.training.steps.lightning_strategies import check_lightning_strategy

_OURS = {
    "deepspeed": "lit_ft.strategies.DeepSpeedStrategy: --config recipes/strategies/deepspeed_zero2.yaml",
    "fsdp": "lit_ft.strategies.FSDPStrategy: --config recipes/strategies/fsdp.yaml",
}
"""By the beginning of a name of Lightning's: the strategy that runs on CPUs too."""


@contextmanager
def explained_trainer(accelerator: str) -> Iterator[None]:
    """Turn what ``Trainer`` raises for bad arguments into a ``RecipeError``.

    Args:
        accelerator: accelerator of the recipe.
    """
    try:
        yield
    except RecipeError:
        raise  # a strategy's own, with its own advice
    except (ImportError, ValueError, TypeError, MisconfigurationException) as error:
        is_absent = accelerator not in ("auto", "cpu") and not torch.accelerator.is_available()
        advice = "; give a number of devices from 1 on, or auto" if "devices" in str(error) else ""
        if "enable_checkpointing" in str(error):
            advice = "; leave trainer.enable_checkpointing out, or take ModelCheckpoint out of trainer.callbacks"
        if is_absent:
            advice = "; torch sees no accelerator here: leave trainer.accelerator out, or set cpu"
        raise RecipeError(f"trainer: {shortened(str(error), 400).rstrip('.')}{advice}") from error


def check_strategy_name(strategy: object) -> None:
    """Refuse the name of a strategy that there is not, on whichever machine.

    Raises:
        RecipeError: Lightning has no such name, or it is the path of a class that cannot be imported.
    """
    if not isinstance(strategy, str) or strategy == "auto":
        return
    if strategy.startswith("{"):
        raise RecipeError(
            f"trainer.strategy={shortened(strategy, 200)} is no class of a strategy with options of its own; write "
            "--trainer.strategy.class_path CLASS --trainer.strategy.OPTION VALUE, and the error is about one of them"
        )
    if strategy.endswith(".json"):
        raise RecipeError(
            f"trainer.strategy={strategy} is a file; DeepSpeed's configuration is an option of its class: "
            f"--trainer.strategy lit_ft.strategies.DeepSpeedStrategy --trainer.strategy.config {strategy}"
        )
    if "." in strategy:
        near = CLASSES.get(strategy.rpartition(".")[2].lower(), "")
        path = near if near.startswith("lit_ft.strategies.") else "lit_ft.strategies.FSDPStrategy"
        raise RecipeError(
            f"trainer.strategy={strategy} is no name of a strategy of Lightning's; a class is written "
            f"--trainer.strategy.class_path {path}, in a recipe strategy: {{class_path: {path}}}"
        )
    if strategy not in StrategyRegistry:
        raise RecipeError(
            f"trainer.strategy={strategy} is no strategy of Lightning's; write auto, ddp, or a class of "
            "lit_ft.strategies, e.g. --config recipes/strategies/fsdp.yaml"
        )


def check_strategy(strategy: object) -> None:
    """Refuse, beside unknown names, processes that take pickled objects, and Lightning's DeepSpeed and FSDP on CPUs.

    Model and data of a recipe cannot be pickled, and DeepSpeed's ranks would fail one by one.

    Raises:
        RecipeError: the strategy is one of these.
    """
    check_strategy_name(strategy)
    if not isinstance(strategy, str):
        return
    if strategy.startswith("ddp_spawn"):
        raise RecipeError(
            f"trainer.strategy={strategy} pickles model and data for each process, which cannot be pickled; take ddp, "
            "or ddp_fork in a notebook"
        )
    ours = next((ours for name, ours in _OURS.items() if strategy.startswith(name)), None)
    if ours is not None and not torch.cuda.is_available():
        raise RecipeError(
            f"trainer.strategy={strategy} is Lightning's own, for CUDA GPUs alone, and there is none; take {ours}"
        )


def check_ranks(devices: object, accelerator: object) -> None:
    """Refuse more processes on CPUs than the machine can start.

    Args:
        devices: ``trainer.devices``.
        accelerator: ``trainer.accelerator``.

    Raises:
        RecipeError: there are more than ``_RANKS_PER_CORE`` for each core.
    """
    on_cpus = accelerator == "cpu" or (accelerator == "auto" and not torch.accelerator.is_available())
    cores = os.cpu_count() or 1
    number = int(devices) if isinstance(devices, int | str) and str(devices).isdecimal() else 1
    if on_cpus and number > max(cores * _RANKS_PER_CORE, 16):
        raise RecipeError(
            f"trainer.devices={devices} would start {number:,} processes on this machine's {cores} CPU cores; on CPUs "
            "give at most one for each core"
        )


def check_max_time(limit: MaxTime) -> None:
    """Refuse a limit within which no step can be taken.

    Args:
        limit: ``trainer.max_time``.

    Raises:
        RecipeError: the limit is no duration, or not above 0.
    """
    with explained_trainer("cpu"):
        seconds = duration(limit)
    if seconds is not None and seconds <= 0:
        raise RecipeError(
            f"trainer.max_time={limit} would train nothing; give days, hours, minutes and seconds, e.g. 00:12:00:00"
        )


def check_plugins(plugins: Iterable[object]) -> None:
    """Refuse saves in the background that remove a checkpoint before the next one is on the disk.

    Args:
        plugins: ``trainer.plugins``.

    Raises:
        RecipeError: there is an ``AsyncCheckpointIO``.
    """
    if any(isinstance(plugin, AsyncCheckpointIO) for plugin in plugins):
        raise RecipeError(
            "trainer.plugins: AsyncCheckpointIO removes the earlier checkpoint before the later one is written, so "
            "that a kill loses both, and writes no checksums; leave it out; lit_ft.strategies.FSDPStrategy and "
            "ModelParallelStrategy write in the background with save_distributed_checkpoint: true and async_save: true"
        )


_RANKS_PER_CORE = 4
_OF_ANY_MACHINE = (
    *("max_epochs", "min_epochs", "max_steps", "min_steps", "max_time", "log_every_n_steps", "overfit_batches"),
    *("limit_train_batches", "limit_val_batches", "val_check_interval", "check_val_every_n_epoch"),
    *("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm"),
)
"""Options of ``Trainer`` that do not depend on devices."""


def check_trainer(options: Namespace) -> None:
    """Refuse what ``Trainer`` refuses, but for devices, strategy and precision.

    Args:
        options: options of ``trainer`` in a recipe.

    Raises:
        RecipeError: ``Trainer`` refuses a value.
    """
    given = {name: value for name, value in options.items() if name in _OF_ANY_MACHINE}
    check_strategy_name(options.strategy)
    check_max_time(options.max_time)
    if isinstance(options.strategy, Namespace):
        module, _, name = options.strategy.class_path.rpartition(".")
        check_lightning_strategy(getattr(import_module(module), name))
    with explained_trainer("cpu"):
        quiet_trainer(accelerator="cpu", **given)


_OF_VALIDATION = ("val_check_interval", "check_val_every_n_epoch", "limit_val_batches", "num_sanity_val_steps")


def warn_of_no_validation(options: Namespace) -> None:
    """Warn of options for validations in a run that has none; a value of 0 asks for none.

    Args:
        options: options of ``trainer`` in a recipe.
    """
    defaults = signature(Trainer).parameters
    own = {name: (0, defaults[name].default) for name in _OF_VALIDATION}
    given = [f"trainer.{name}={options[name]}" for name in _OF_VALIDATION if options[name] not in own[name]]
    if given:
        why = "there is no validation data (data.val_path, data.val_fraction)"
        if options.limit_val_batches == 0:
            why = f"trainer.limit_val_batches={options.limit_val_batches} leaves no validation"
        rank_zero_warn(f"{', '.join(given)} without an effect: {why}")


def warn_of_options_without_effect(options: Namespace, model: nn.Module, data: object) -> None:
    """Warn of options for layers that the model has not, and for samplers that ``TextDataModule`` does not take.

    Args:
        options: options of ``trainer`` in a recipe.
        model: the model, which may be on the meta device.
        data: the data module.
    """
    if options.sync_batchnorm and not any(isinstance(layer, _BatchNorm) for layer in model.modules()):
        rank_zero_warn("trainer.sync_batchnorm=true has no effect: the model has no batch normalization; leave it out")
    if not options.use_distributed_sampler and isinstance(data, TextDataModule):
        rank_zero_warn(
            "trainer.use_distributed_sampler=false has no effect: lit_ft.TextDataModule itself gives each rank its "
            "share of the rows; leave it out"
        )


def quiet_trainer(**options: Any) -> Trainer:
    """Trainer that logs, saves and shows nothing.

    Args:
        options: further options of ``Trainer``.
    """
    return Trainer(
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **options
    )
