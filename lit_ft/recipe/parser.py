"""Parser of recipes: help for all options, errors in one line, and only allowed code."""

import argparse
import inspect
import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import requires
from textwrap import dedent
from typing import Any, NoReturn

from jsonargparse import ArgumentParser, Namespace, get_loader, set_loader
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins import LayerSync, Precision
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies import Strategy
from peft import PeftConfig
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers.utils.quantization_config import QuantizationConfigMixin
from yaml import YAMLError

from lit_ft.bounded_yaml import bounded
from lit_ft.data.text_data import TextDataModule
from lit_ft.errors import RecipeError
from lit_ft.internals.jsonargparse import option_names
from lit_ft.recipe import allowed_code
from lit_ft.recipe.other_trainers import CLASSES, OPTIONS
from lit_ft.training.causal_lm import CausalLM

DEFAULT_CLASSES: dict[str, type] = {"model": CausalLM, "data": TextDataModule}
"""Classes of ``model`` and ``data`` where a recipe names no ``class_path``."""


KINDS: tuple[type, ...] = (
    Accelerator,
    Callback,
    CheckpointIO,
    ClusterEnvironment,
    LayerSync,
    LightningDataModule,
    LightningModule,
    Logger,
    LRScheduler,
    Optimizer,
    PeftConfig,
    Precision,
    Profiler,
    QuantizationConfigMixin,
    Strategy,
)
"""Base classes that a recipe may build from the allowed packages, with dataclasses; others may run their arguments."""


_load_yaml = bounded(get_loader("yaml"))


class RecipeParser(LightningArgumentParser):
    """LightningArgumentParser with one-line errors that suggest the nearest option, and help on the default classes."""

    def __init__(self, *args: Any, **options: Any) -> None:
        allowed_code.enforce()
        set_loader("yaml", _load_yaml, (YAMLError,))
        super().__init__(*args, **options)

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
        raise RecipeError(explain(message, self)) from None


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


def unwrap_class_error(error: Exception) -> RecipeError:
    """Extract the error of a recipe's class from the exceptions that jsonargparse wraps around it."""
    if isinstance(error, RecipeError):
        return error
    if not isinstance(error, ValueError):  # the text of a KeyError, for example, is only a key
        reason = f"{type(error).__name__}: {error}"
        return RecipeError(f"a class of the recipe cannot be built: {reason}; fix its init_args")
    said: BaseException = error
    while said.__cause__ is not None and _UNION.match(str(said)) and _reason_of_class(str(said)) is None:
        said = said.__cause__
    return said if isinstance(said, RecipeError) else RecipeError(_reason_of_class(str(said)) or str(said))


_UNION = re.compile("Does not validate against any of the Union subtypes")
_NO_CLASS = ("Expected a", "Not a valid subclass")
_IN_CLASS = re.compile(r"Problem with given class_path '[\w.]*?(\w+)':\s*(?=\S)")


def _reason_of_class(message: str) -> str | None:
    """Reason that a class gave, in a jsonargparse message, which nests reasons by their indentation; None without one.

    Of an option of several types (e.g. a strategy's name or its class) jsonargparse lists a reason for each type.
    """
    first, _, rest = message.strip().partition("\n")
    message = f"{first}\n{dedent(rest)}"
    if _UNION.match(message):
        reasons = re.split(r"^  - ", message.partition("\nGiven value type")[0], flags=re.MULTILINE)[1:]
        found = [_reason_of_class(reason) for reason in reasons if not reason.startswith(_NO_CLASS)]
        return found[-1] if found else None
    if (head := _IN_CLASS.match(message)) is not None:
        return f"{head[1]}: {_reason_of_class(message[head.end() :])}"
    missing = re.match(r"No module named '([\w.]+)'", first)
    return _how_to_install(missing[1]) if missing is not None else first or None


def explain(message: str, parser: LightningArgumentParser) -> str:
    """Shorten a jsonargparse message to one line, and suggest the nearest option for an unknown one."""
    key = ".".join(re.findall(r'Parser key "([\w.]+)"', message))
    if (denied := re.search(r"Importing '([\w.]+)' is not allowed", message)) is not None:
        return str(allowed_code.refusal(denied[1], key))
    unknown = re.search(r"unrecognized arguments: --([\w.]+)|Option '([\w.]+)' is not accepted", message)
    unknown = unknown or re.search(r"[Kk]ey '([\w.]+)' is not expected|does not accept option '([\w.]+)'", message)
    if unknown is not None:
        name = next(group for group in unknown.groups() if group)
        options = _options(message, parser)
        # The full name, or its first section: `optimiser.class_path` is a misspelled `optimizer`.
        section, _, word = name.rpartition(".")
        ours = OPTIONS.get(word) if section in ("", "model", "data", "trainer") else None
        part = (ours or "").rpartition(".")[0]
        if ours == f"{part}.{name}" and part in CLASSES and not message.startswith("unrecognized"):
            return f"{name} is an option of a class, and none is named; name one, e.g. --{part} {CLASSES[part]}"
        if ours is not None:
            return (f"{key}: " if key else "") + f"unknown option {shortened(name, 100)!r}; here it is {ours}"
        near = [near for part in (name, name.split(".")[0]) for near in get_close_matches(part, options, cutoff=0.7)]
        advice = f"did you mean {near[0]!r}?" if near else "see --help for what there is"
        return (f"{key}: " if key else "") + f"unknown option {shortened(name, 100)!r}; {advice}"
    if (missing := re.search(r"No module named '([\w.]+)'", message)) is not None:
        return (f"{key}: " if key else "") + _how_to_install(missing[1])
    if (short := re.search(r"Expected a dot import path string: (\w+)", message)) is not None:
        ours = CLASSES.get(short[1].lower())
        advice = f"write {ours}" if ours else "write the module and the class, e.g. torch.optim.AdamW"
        return f"{key}: {shortened(short[1], 100)!r} is no class path; {advice}"
    if (absent := re.search(r"module '([\w.]+)' has no attribute '(\w+)'", message)) is not None:
        near = get_close_matches(absent[2], dir(import_module(absent[1])), n=1)
        advice = f"did you mean {absent[1]}.{near[0]}?" if near else "fix the class_path"
        return f"{key}: there is no {absent[1]}.{shortened(absent[2], 100)}; {advice}"
    if (needed := re.search(r"following arguments are required: ([\w., ]+)", message)) is not None:
        names = " and ".join(sorted(name.rpartition(".")[2] for name in needed[1].split(", ")))
        return f"{names}: the recipe names the section without options; give them, or leave the name out"
    reasons = _reasons(re.sub(r'Parser key "[\w.]+":', "\n", message))
    return f"{key}.{reasons}" if key and re.match(r"[\w.]+: ", reasons) else f"{key}: {reasons}" if key else reasons


def _reasons(message: str) -> str:
    """Reasons in a jsonargparse message, without the types that it tried and the values that it repeats."""
    message = re.sub(r"Type typing.Callable\[.*?\] expects a function or a callable class: ", "", message)
    message = re.sub(r"[Ee]xpected (a )?<class '([\w.]+)'>", r"expected \2", message)
    message = re.sub(r"[Ee]xpected a typing.Literal\[", "expected one of [", message)
    message = re.sub(r"unhashable type: .*|argument of type .* is not iterable", "class_path must be a text", message)
    parts = [part.strip(" -") for line in message.splitlines() for part in line.split("; ")]
    parts = [re.sub(r"\.? Got value: ?([\[{]|Namespace).*", "", part) for part in parts if part]
    parts = [part for part in parts if not part.startswith(_NOISE)] or [message.strip()]
    # Where no class was named, the types are the only reasons.
    is_told = any(not part.startswith((*_TYPES, "Given value")) for part in parts)
    telling = [part for part in parts if not (is_told and part.startswith(_TYPES))]
    text = "; ".join(dict.fromkeys(shortened(part, 200) for part in telling))
    return shortened(text, 600)


def shortened(text: str, length: int) -> str:
    """Cut a text to at most ``length`` characters, with ``...`` at the end."""
    return text if len(text) <= length else f"{text[: length - 3]}..."


_NOISE = (
    "Parser key",
    "Does not validate",
    "Subtypes",
    "Errors:",
    "expected NoneType",
    "Problem with given class_path",
    "Given value type",
    "Given value: Namespace",
    "Given value: {",
    "Given value: [",
    "Subclass types expect one of",
    "a class path (str)",
    "a dict with",
    "Given value: NestedArg",
)
"""Beginnings of message lines in which jsonargparse lists types and values."""
_TYPES = ("Not a valid subclass of", "Expected an instantiatable class")
"""Beginnings of message lines about the classes that an option allows."""


def _how_to_install(module: str) -> str:
    """Advice for a class that needs a module that is not installed."""
    for requirement in requires("lit-ft") or []:
        extra = re.search(r"extra == .(\w+)", requirement)
        package = re.split(r"[^\w.-]", requirement)[0]
        if extra is not None and package.replace("-", "_") == module.split(".")[0]:
            return f"the package {package} is not installed; pip install -e '.[{extra[1]}]', or {package} alone"
    return f"no module {module!r} is installed; fix the class_path, or install the package that has it"


def _options(message: str, parser: LightningArgumentParser) -> list[str]:
    """Names of the options that an unknown name is compared with."""
    options = [name for name in option_names(parser) if not name.endswith("help")]
    classes = list(DEFAULT_CLASSES.values())
    for class_path in re.findall(r"class_path '([\w.]+)'", message):
        module, _, name = class_path.rpartition(".")
        if allowed_code.is_allowed(module, [*allowed_code.PACKAGES, *allowed_code.allowed_by_user()]):
            classes.append(getattr(import_module(module), name))
    return options + [name for cls in classes for name in inspect.signature(cls).parameters]
