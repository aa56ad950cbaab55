"""Parser of recipes: help for all options, errors in one line (by ``parse_errors``), and only allowed code."""

import argparse
import ast
import inspect
import logging
import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from enum import Enum
from importlib import import_module
from typing import Any, NoReturn

import yaml
from jsonargparse import ArgumentParser, Namespace, get_loader, set_dumper, set_loader
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins import LayerSync, Precision
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from peft import PeftConfig
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers.utils.quantization_config import QuantizationConfigMixin

from lit_ft.bounded_yaml import bounded
from lit_ft.data.text_data import TextDataModule
from lit_ft.errors import RecipeError
from lit_ft.internals.jsonargparse import ListReplacingParser, class_change, option_names
from lit_ft.internals.peft import accept_all_inits
from lit_ft.recipe import allowed_code
from lit_ft.recipe.parse_errors import explain
from lit_ft.training.causal_lm import CausalLM
from lit_ft.training.distillation.divergences import Divergence
from lit_ft.training.loss.token_weights import TokenWeights
from lit_ft.training.policy.algorithms import Algorithm
from lit_ft.training.policy.rewards import Reward
from lit_ft.training.preference.objectives import Objective

DEFAULT_CLASSES: dict[str, type] = {"model": CausalLM, "data": TextDataModule}
"""Classes of ``model`` and ``data`` where a recipe names no ``class_path``."""


KINDS: tuple[type, ...] = (
    Accelerator,
    Callback,
    CheckpointIO,
    ClusterEnvironment,
    Divergence,
    LayerSync,
    LightningDataModule,
    LightningModule,
    Logger,
    LRScheduler,
    Objective,
    Algorithm,
    Reward,
    Optimizer,
    PeftConfig,
    Precision,
    Profiler,
    QuantizationConfigMixin,
    Strategy,
    TokenWeights,
)
"""Base classes that a recipe may build from the allowed packages, with dataclasses; others may run their arguments."""


accept_all_inits()
_load_yaml = bounded(get_loader("yaml"))


class _Dumper(yaml.SafeDumper):
    """Dumper that writes a member of an enumeration as its value, e.g. the default of Lightning's ``Timer``."""


_Dumper.add_multi_representer(Enum, lambda dumper, member: dumper.represent_data(member.value))


def _dump_yaml(recipe: object) -> str:
    return yaml.dump(recipe, Dumper=_Dumper, default_flow_style=False, allow_unicode=True, sort_keys=False)


class _DroppedOptions(logging.Handler):
    """Warn about options of a class that another class, which takes its place, does not have."""

    def emit(self, record: logging.LogRecord) -> None:
        if (change := class_change(record)) is not None and (options := _set_by_user(change.before, change.dropped)):
            rank_zero_warn(
                f"{change.after} takes the place of {change.before}, whose options {options} it does not have: dropped"
            )


def _set_by_user(class_path: str, options: str) -> str:
    """Those of a class's options, as text, that are neither null nor the class's default."""
    module, _, name = class_path.rpartition(".")
    parameters = inspect.signature(getattr(import_module(module), name)).parameters
    try:
        values: dict[str, object] = ast.literal_eval(options)
    except (ValueError, SyntaxError):  # a value is an object
        return options
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    return ", ".join(f"{name}={value!r}" for name, value in values.items() if value not in (None, defaults.get(name)))


_LOGGER = logging.getLogger(f"{__name__}.dropped")  # by name: jsonargparse copies parsers
_LOGGER.setLevel(logging.DEBUG)
_LOGGER.propagate = False
_LOGGER.addHandler(_DroppedOptions())


class RecipeParser(ListReplacingParser, LightningArgumentParser):
    """LightningArgumentParser with one-line errors that suggest the nearest option, and help on the default classes."""

    def __init__(self, *args: Any, **options: Any) -> None:
        allowed_code.enforce()
        set_loader("yaml", _load_yaml, (yaml.YAMLError,))
        set_dumper("yaml", _dump_yaml)
        # An abbreviation would become another option's as soon as a version has one more of this beginning.
        super().__init__(*args, **{"allow_abbrev": False, "logger": _LOGGER, **options})

    def instantiate(self, namespace: Namespace, *args: object, **options: object) -> Namespace:
        """Build the classes that the recipe names.

        Raises:
            RecipeError: a class is not allowed.
        """
        for key, class_path in class_paths(namespace):
            check_class(re.sub(r"^(fit|validate|test|predict)\.|\.init_args", "", key), class_path)
        return super().instantiate(namespace, *args, **options)

    def format_help(self) -> str:
        """Help text of the options, followed by the options of lit_ft's default model and data classes."""
        text = super().format_help()
        if "model" not in option_names(self):
            return text
        for part, cls in DEFAULT_CLASSES.items():
            options = ArgumentParser(usage=argparse.SUPPRESS, add_help=False)
            options.add_class_arguments(cls, part, skip={"optimizer", "lr_scheduler"})
            text += f"\nThe default {part}, lit_ft.{cls.__name__}:\n{options.format_help()}"
        return text

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise an error instead of printing the usage.

        Raises:
            RecipeError: always.
        """
        raise RecipeError(explain(message, self, DEFAULT_CLASSES.values())) from None


def class_paths(value: object, key: str = "") -> Iterator[tuple[str, str]]:
    """Iterate over the classes that a parsed recipe names, as pairs of key and class path, in options of any type."""
    if isinstance(value, Namespace):
        value = vars(value)
    if isinstance(value, dict):
        if isinstance(value.get("class_path"), str):
            yield key, value["class_path"]
        for name, item in value.items():
            yield from class_paths(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple | set):
        for item in value:
            yield from class_paths(item, key)


def check_class(key: str, class_path: str) -> None:
    """Refuse code that neither the user allows nor ``KINDS`` includes.

    A function would be called with its arguments, for any type of the option.

    Raises:
        RecipeError: the code is not allowed; the message says how to allow it.
    """
    by_user = allowed_code.allowed_by_user()
    if allowed_code.is_allowed(class_path, by_user):
        return
    if not allowed_code.is_allowed(class_path):
        raise allowed_code.refusal(class_path, key)
    module, _, name = class_path.rpartition(".")
    try:
        named = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise RecipeError(f"{key}: there is no {class_path!r} ({error}); fix the class_path") from error
    if allowed_code.is_allowed(named.__module__, by_user):
        return
    if not isinstance(named, type) or not (issubclass(named, KINDS) or is_dataclass(named)):
        raise allowed_code.refusal(class_path, key)
