"""Checks of a parsed recipe for bad values that its types allow, before anything is built."""

import inspect
import json
import math
import re
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from jsonargparse import Namespace
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.utilities import CombinedLoader

from lit_ft.errors import RecipeError

_Loaders = TypeVar("_Loaders")

LARGEST_SEED = 2**32 - 1


def check_values(options: Namespace) -> None:
    """Refuse bad values that the types of the options allow.

    Args:
        options: parsed options of one command.

    Raises:
        RecipeError: a value is not allowed; the message names its key.
    """
    if (key := _key_of_null_character(options.as_dict())) is not None:
        raise RecipeError(f"{key} holds a null character (\\x00), which no name or path may; take it out")
    trainer = options.get("trainer")
    if not isinstance(trainer, Namespace):
        raise RecipeError(
            f"trainer={_shown(trainer)} is no mapping; give options by name, e.g. trainer: {{max_epochs: 1}}"
        )
    seed = options.get("seed_everything")
    if isinstance(seed, int) and not isinstance(seed, bool) and not 0 <= seed <= LARGEST_SEED:
        raise RecipeError(f"seed_everything={seed} must be 0 to {LARGEST_SEED}")
    _check_nulls(trainer, Trainer, "trainer")
    _check_numbers(trainer)
    for key in ("model", "data"):
        _check_classes(options.get(key), key)
    for key in ("callbacks", "logger", "strategy", "plugins"):
        _check_classes(trainer.get(key), f"trainer.{key}")
    _check_repeated(trainer.get("callbacks"))


_LEAST = {
    "accumulate_grad_batches": 1,
    "check_val_every_n_epoch": 1,
    "gradient_clip_val": 0,
    "log_every_n_steps": 0,
    "num_nodes": 1,
    "num_sanity_val_steps": -1,
}
"""Smallest values of options that Lightning takes as they are."""


def _check_numbers(trainer: Namespace) -> None:
    for name, least in _LEAST.items():
        value = trainer.get(name)
        if isinstance(value, int | float) and not value >= least:
            raise RecipeError(f"trainer.{name}={value} must be {least} or more")
    if (norm := trainer.get("gradient_clip_val")) == math.inf:
        raise RecipeError(f"trainer.gradient_clip_val={norm} clips nothing; leave it out (train/grad_norm is logged)")
    for least_name, most_name in (("min_epochs", "max_epochs"), ("min_steps", "max_steps")):
        least, most = trainer.get(least_name), trainer.get(most_name)
        if least is not None and most not in (None, -1) and least > most:
            raise RecipeError(
                f"trainer.{least_name}={least} is more than trainer.{most_name}={most}, where training ends; lower one "
                "or raise the other"
            )
    interval = trainer.get("val_check_interval")
    if isinstance(interval, int | float) and not interval > 0:
        raise RecipeError(
            f"trainer.val_check_interval={interval} must be above 0; for no validation set trainer.limit_val_batches=0"
        )
    if (algorithm := trainer.get("gradient_clip_algorithm")) is not None and not trainer.get("gradient_clip_val"):
        raise RecipeError(
            f"trainer.gradient_clip_algorithm={algorithm} clips nothing without trainer.gradient_clip_val; give it, "
            "e.g. 1.0, or leave both out"
        )
    if (folder := trainer.get("default_root_dir")) is not None:
        raise RecipeError(f"trainer.default_root_dir={folder}: a run's files are in run_dir; write run_dir: {folder}")
    if (registry := trainer.get("model_registry")) is not None:
        raise RecipeError(
            f"trainer.model_registry={registry} is for Lightning's default ModelCheckpoint and for checkpoints of "
            "litmodels, and a run here has neither; leave it out, or list litmodels' checkpoint callback in "
            "trainer.callbacks"
        )
    if trainer.get("barebones"):
        raise RecipeError(
            "trainer.barebones=true is for measuring Lightning's own time: it logs and saves nothing; leave it out"
        )


def _check_repeated(callbacks: object) -> None:
    """Refuse a callback that is listed twice with the same options, as by a fragment that is given twice."""
    listed = callbacks if isinstance(callbacks, list) else []
    if (twice := next((one for number, one in enumerate(listed) if one in listed[:number]), None)) is not None:
        raise RecipeError(
            f"trainer.callbacks lists {twice.class_path} twice with the same options; leave one out (callbacks+ adds "
            "to the list of the recipe before it)"
        )


_LIMITS = {"validate": "limit_val_batches", "test": "limit_test_batches", "predict": "limit_predict_batches"}


def check_something_runs(command: str, trainer: Namespace) -> None:
    """Refuse options of the trainer with which a command does nothing.

    Args:
        command: fit, validate, test or predict.
        trainer: options of the trainer.

    Raises:
        RecipeError: the run would have no step, or no batch.
    """
    if command != "fit":
        if (value := trainer.get(name := _LIMITS[command])) == 0:
            raise RecipeError(f"trainer.{name}={value} leaves nothing to {command}; give more, or leave it out")
        return
    for name in ("max_steps", "max_epochs", "limit_train_batches"):
        if (value := trainer.get(name)) == 0:
            raise RecipeError(f"trainer.{name}={value} would train nothing; give more, or use the command validate")


def _key_of_null_character(value: object, key: str = "") -> str | None:
    if isinstance(value, str):
        return key if "\x00" in value else None
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    keys = (_key_of_null_character(item, f"{key}.{name}" if key else f"{name}") for name, item in inner)
    return next((one for one in keys if one is not None), None)


def _check_classes(value: object, key: str) -> None:
    if isinstance(value, list):
        for item in value:
            _check_classes(item, key)
    if not isinstance(value, Namespace) or not isinstance(arguments := value.get("init_args"), Namespace):
        return
    module, _, name = value.class_path.rpartition(".")
    _check_nulls(arguments, getattr(import_module(module), name), key)
    for option, item in vars(arguments).items():
        _check_classes(item, f"{key}.{option}")


def _check_nulls(values: Namespace, made: Callable[..., object], key: str) -> None:
    """Refuse null for options whose type does not allow None: jsonargparse passes it on."""
    defaults = _defaults_without_null(made)
    for name, value in vars(values).items():
        if value is None and name in defaults:
            default = defaults[name]
            advice = f"the default is {_shown(default)}" if default is not inspect.Parameter.empty else "it is needed"
            key = re.sub(r"^model\.(?=optimizer|lr_scheduler)", "", key)  # which the model gets
            raise RecipeError(f"{key}.{name}=null is not allowed; leave it out or give a value ({advice})")


def _defaults_without_null(made: Callable[..., object]) -> dict[str, object]:
    """Defaults of the options whose type does not allow None, by name, of a class with the bases it hands others to."""
    defaults: dict[str, object] = {}
    named: set[str] = set()
    inits = [vars(base).get("__init__") for base in made.__mro__] if isinstance(made, type) else [made]
    for init in (one for one in inits if one is not None):
        try:
            parameters, hints = inspect.signature(init).parameters, get_type_hints(init)
        except (NameError, TypeError, ValueError):  # hints that exist for type checkers only cannot be checked
            break
        for name, parameter in parameters.items():
            if name not in named and name in hints and not _takes_none(hints[name]) and parameter.default is not None:
                defaults[name] = parameter.default
        named |= parameters.keys()
        if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters.values()):
            break
    return defaults


def _takes_none(hint: object) -> bool:
    if get_origin(hint) in (Union, UnionType):
        return any(_takes_none(part) for part in get_args(hint))
    return hint in (Any, object, None, type(None), inspect.Parameter.empty)


def _shown(value: object) -> str:
    try:
        text = json.dumps(value)
    except TypeError:
        text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def allow_one_loader(data: LightningDataModule) -> None:
    """Make a data module raise an error if it returns several validation or test dataloaders.

    Lightning requests them after the weights are loaded and before training; its own error names module code.
    """
    for name in ("val_dataloader", "test_dataloader"):
        setattr(data, name, _only_one(getattr(data, name), f"{type(data).__name__}.{name}"))


def _only_one(make: Callable[[], _Loaders], name: str) -> Callable[[], _Loaders]:
    @wraps(make)  # Lightning needs it to see that the data module defines the method
    def made() -> _Loaders:
        loaders = make()
        combined = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders, "sequential")
        if len(combined.flattened) > 1:
            raise RecipeError(
                f"data: {name} gives {len(combined.flattened)} loaders, and CausalLM takes one; return one over all "
                "rows (torch.utils.data.ConcatDataset), or use lit_ft.TextDataModule with data.val_sources, which "
                "gives each source a loss of its own"
            )
        return loaders

    return made
