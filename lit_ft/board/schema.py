"""Options of ``fit`` as fields of a form, from the parser that prints ``--help``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from importlib import import_module
from inspect import signature
from typing import TYPE_CHECKING

from jsonargparse import ArgumentParser

from lit_ft.internals.jsonargparse import OptionSchema, accepted, option_schemas
from lit_ft.recipe.allowed_code import allowed_by_user, is_allowed
from lit_ft.recipe.parser import DEFAULT_CLASSES

if TYPE_CHECKING:
    from lit_ft.board.recipe_text import RecipeText

GROUPS: dict[str, tuple[str, ...]] = {
    "model": ("model.pretrained", "model.dtype", "model.quantization", "model.attn_implementation"),
    "method": (
        "model.peft",
        "model.peft.r",
        "model.peft.lora_alpha",
        "model.peft.lora_dropout",
        "model.peft.target_modules",
        "merge",
    ),
    "data": (
        "data.path",
        "data.val_path",
        "data.val_fraction",
        "data.format",
        "data.system",
        "data.chat_template",
        "data.max_length",
    ),
    "batch": (
        "data.micro_batch_size",
        "trainer.accumulate_grad_batches",
        "data.packing",
        "model.gradient_checkpointing",
        "trainer.precision",
        "trainer.accelerator",
        "trainer.devices",
    ),
    "optimizer": (
        "optimizer",
        "optimizer.lr",
        "optimizer.weight_decay",
        "lr_scheduler",
        "lr_scheduler.warmup",
        "trainer.gradient_clip_val",
    ),
    "length": (
        "trainer.max_epochs",
        "trainer.max_steps",
        "trainer.val_check_interval",
        "trainer.log_every_n_steps",
        "seed_everything",
    ),
}
"""Most used options, by group; all others are reached by their name."""

_METHODS: dict[str, dict[str, object]] = {
    "LoraConfig": {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"},
    "AdaLoraConfig": {"target_modules": "all-linear", "total_step": 1000},
    "IA3Config": {},
    "PromptTuningConfig": {"num_virtual_tokens": 20},
    "PrefixTuningConfig": {"num_virtual_tokens": 20},
}
_NF4 = {
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_compute_dtype": "bfloat16",
    "bnb_4bit_use_double_quant": True,
}
_INT8 = {"load_in_8bit": True}
PRESETS: dict[str, dict[str, dict[str, object]]] = {
    "model.peft": {
        name: {"class_path": f"peft.{name}", "init_args": {"task_type": "CAUSAL_LM", **arguments}}
        for name, arguments in _METHODS.items()
    },
    "model.quantization": {
        "NF4": {"class_path": "transformers.BitsAndBytesConfig", "init_args": _NF4},
        "INT8": {"class_path": "transformers.BitsAndBytesConfig", "init_args": _INT8},
    },
    "optimizer": {
        "AdamW": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 1e-4}},
        "SGD": {"class_path": "torch.optim.SGD", "init_args": {"lr": 1e-2}},
        "AdamW8bit": {"class_path": "bitsandbytes.optim.AdamW8bit", "init_args": {"lr": 1e-4}},
        "PagedAdamW8bit": {"class_path": "bitsandbytes.optim.PagedAdamW8bit", "init_args": {"lr": 1e-4}},
    },
    "lr_scheduler": {
        name: {"class_path": f"lit_ft.schedules.{name}", "init_args": {"warmup": 0.05}}
        for name in ("CosineWithWarmup", "LinearWithWarmup")
    },
}
"""Classes that a form offers for an option that takes one; any other is written in the YAML."""


@dataclass(frozen=True)
class Field:
    """An option as a form shows it.

    Attributes:
        name: key of the recipe and name of the option, e.g. ``data.max_length``.
        help: text of ``--help``.
        default: what is used where a recipe leaves the option out, as text; empty for nothing.
        choices: the values that it takes, where these are few; else empty.
        is_text: whether it takes a text alone, so that a form's text needs no quotes.
    """

    name: str
    help: str
    default: str
    choices: tuple[str, ...] = ()
    is_text: bool = False


class Schema:
    """Fields of all options, those of the classes that a recipe names included."""

    def __init__(self, parser: ArgumentParser) -> None:
        """Read a parser.

        Args:
            parser: parser of ``fit``.
        """
        self._parser = parser
        self._of_class: dict[tuple[str, str], dict[str, Field]] = {}

    @cached_property
    def own(self) -> dict[str, Field]:
        """Options of ``fit`` and of lit_ft's model and data, by name."""
        fields = {one.name: _field(one) for one in option_schemas(self._parser) if one.name not in _LEFT_OUT}
        for part, cls in DEFAULT_CLASSES.items():
            options = ArgumentParser(add_help=False)
            options.add_class_arguments(cls, part, skip={"optimizer", "lr_scheduler"})
            fields |= {one.name: _field(one) for one in option_schemas(options)}
        return fields

    def of_class(self, key: str, class_path: str) -> dict[str, Field]:
        """Options of a class that a recipe names for a key; empty where the class cannot be read.

        Args:
            key: option that takes the class, e.g. ``model.peft``.
            class_path: the class; only those of packages that every recipe may name are imported.
        """
        if (key, class_path) not in self._of_class:
            self._of_class[key, class_path] = {one.name: one for one in _fields_of(key, class_path)}
        return self._of_class[key, class_path]

    def kept(self, key: str, class_path: str, arguments: Mapping[str, object]) -> dict[str, object]:
        """Arguments of an earlier class for a key that another class takes too, as a later ``--config`` keeps them."""
        options = _class_options(key, class_path)
        return {} if options is None else accepted(options, key, arguments)

    def fields(self, recipe: RecipeText) -> dict[str, Field]:
        """All options that a recipe has, by name."""
        fields_by_name = dict(self.own)
        for key, class_path in recipe.classes().items():
            fields_by_name |= self.of_class(key, class_path)
        return fields_by_name

    def grouped(self, recipe: RecipeText) -> dict[str, list[Field]]:
        """Most used options by group, as far as the recipe's classes have them."""
        fields = self.fields(recipe)
        return {group: [fields[name] for name in names if name in fields] for group, names in GROUPS.items()}

    def others(self, recipe: RecipeText) -> dict[str, Field]:
        """Options that no group has, by name."""
        used = {name for names in GROUPS.values() for name in names}
        return {name: field for name, field in sorted(self.fields(recipe).items()) if name not in used}


_LEFT_OUT = ("config", "run_dir", "ckpt_path", "resume", "resume_data", "model", "data", "weights_only")
"""Options that the board sets itself, and sections."""


def _class_options(key: str, class_path: str) -> ArgumentParser | None:
    """Parser of the options of a class; None where it may not be imported, or cannot be read."""
    if not (is_allowed(class_path) or is_allowed(class_path, allowed_by_user())):
        return None
    options = ArgumentParser(add_help=False)
    try:
        cls = _class(class_path)
        options.add_class_arguments(cls, key, fail_untyped=False, skip=_first_positional(cls))
    except (ImportError, AttributeError, TypeError, ValueError):  # `check` says what is wrong with the class
        return None
    return options


def _class(class_path: str) -> Callable[..., object]:
    module, _, name = class_path.rpartition(".")
    return getattr(import_module(module), name)


def _fields_of(key: str, class_path: str) -> list[Field]:
    options = _class_options(key, class_path)
    if options is None:
        return []
    cls = _class(class_path)
    # PEFT describes its options there, and not in its docstrings.
    helps = {one.name: str(one.metadata.get("help", "")) for one in fields(cls)} if is_dataclass(cls) else {}
    options_as_fields = [_field(one) for one in option_schemas(options)]
    return [
        replace(one, help=one.help or _plain(helps.get(one.name.rpartition(".")[2], ""))) for one in options_as_fields
    ]


def _first_positional(cls: Callable[..., object]) -> set[str | int]:
    """What the caller of a class gives: an optimizer gets the parameters, a schedule the optimizer."""
    return {name for name in signature(cls).parameters if name in ("params", "optimizer")}


def _field(option: OptionSchema) -> Field:
    default = "" if option.default is None or "SUPPRESS" in str(option.default) else _text(option.default)
    return Field(option.name, _plain(option.help), default, option.choices, option.is_text)


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _plain(text: str) -> str:
    """Help without the marks of reStructuredText, and without the default, which a field shows itself."""
    text = re.sub(r"Default: ``.*?``\.?", "", text)
    text = re.sub(r":\w+:`~?([^`]+)`", r"\1", text).replace("``", "").replace("%%", "%")
    return " ".join(text.split())


def matching_preset(key: str, value: object) -> str | None:
    """Name of the preset with the class of a value; None for another class."""
    class_path = value.get("class_path") if isinstance(value, Mapping) else None
    arguments = value.get("init_args") or {} if isinstance(value, Mapping) else {}
    near = [name for name, preset in PRESETS.get(key, {}).items() if preset["class_path"] == class_path]
    if key == "model.quantization":  # one class, told apart by what it loads
        near = [name for name in near if arguments.get("load_in_8bit" if name == "INT8" else "load_in_4bit")]
    return near[0] if near else None
