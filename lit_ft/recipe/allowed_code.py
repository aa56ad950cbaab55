"""Allow-list of the Python code that a recipe may name: fixed packages, and modules that the user adds.

Importing a module runs its code, so names are checked before the import. A recipe cannot extend the list: only the
command line, the environment and the user's own settings file can.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from lit_ft.errors import RecipeError

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy

PACKAGES = (
    "lit_ft",
    "lit_callbacks",
    "lightning",
    "torch",
    "transformers",
    "peft",
    "deepspeed",
    "bitsandbytes",
    "torchmetrics",
    "torchao",
    "liger_kernel",
    "datasets",
    "schedulefree",
    "pytorch_optimizer",
    "swanlab",
)
"""Packages whose classes any recipe may name."""

VARIABLE = "LIT_FT_ALLOW_CODE"
"""Environment variable with the modules that the user allows, separated by commas; child processes inherit it."""

OPTION = "--allow_code"

_granted: set[str] = set()


def settings_file() -> Path:
    """Path of the user's own settings, ``$XDG_CONFIG_HOME/lit_ft/settings.yaml``."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "lit_ft" / "settings.yaml"


def take_option(arguments: list[str]) -> list[str]:
    """Remove ``--allow_code MODULE`` from a command line, and allow its modules here and in child processes.

    Returns:
        Remaining arguments.

    Raises:
        RecipeError: no module follows, or the value is not a module name.
    """
    rest, modules = separated(arguments)
    if modules:
        os.environ[VARIABLE] = ",".join(dict.fromkeys([*_from_environment(), *modules]))
    return rest


def separated(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Arguments of a command line without ``--allow_code MODULE``, and its modules.

    Raises:
        RecipeError: no module follows, or the value is not a module name.
    """
    rest: list[str] = []
    modules: list[str] = []
    remaining = iter(arguments)
    for argument in remaining:
        option, equals, value = argument.partition("=")
        if option != OPTION:
            rest.append(argument)
            continue
        modules += _checked((value if equals else next(remaining, "")).split(","), OPTION)
    return rest, modules


def as_options() -> str:
    """Options that allow the same modules in another command; empty if none are allowed, else with a space before."""
    return "".join(f" {OPTION} {name}" for name in _from_environment())


def allowed_by_user() -> list[str]:
    """Modules that the command line, the environment and the settings file allow.

    Raises:
        RecipeError: the settings file cannot be used, or a value is not a module name.
    """
    return [*_from_environment(), *_from_settings()]


def is_allowed(path: str, prefixes: tuple[str, ...] | list[str] = PACKAGES) -> bool:
    """Whether a dotted path is one of the modules, or part of one."""
    return any(path == prefix or path.startswith(f"{prefix}.") for prefix in prefixes)


def enforce() -> None:
    """Restrict the imports of jsonargparse to allowed code: by its name, then by the module that defines it."""
    from jsonargparse import set_parsing_settings

    modules = allowed_by_user()
    denied = ["*", *_WITHIN_PACKAGES, *_granted.difference(modules, PACKAGES)]
    set_parsing_settings(import_path_denylist=denied, import_path_allowlist=[*PACKAGES, *modules])
    _granted.update(modules)


_WITHIN_PACKAGES = ("torch.hub", "torch.load", "torch.package", "torch.utils.cpp_extension", "torch.serialization")
"""Modules of allowed packages that exist to run or load code; ``parser.check_class`` refuses other such code."""


def refusal(path: str, key: str = "") -> RecipeError:
    """Build the error for code that is not allowed.

    Args:
        path: dotted path that the recipe names.
        key: key of the recipe that names it.
    """
    if is_allowed(path):
        module, reason = path, "is no optimizer, callback or other class that options of a recipe take"
    else:
        module, reason = path.split(".")[0], f"is code outside of the packages of every recipe ({', '.join(PACKAGES)})"
    return RecipeError(
        f"{f'{key}: ' if key else ''}{path!r} {reason}; if you know and trust that code, add {OPTION} {module} to the "
        f"command, or {module} to the list allow_code in {settings_file()}"
    )


def check_unpickling(weights_only: bool | None, strategy: Strategy) -> None:
    """Refuse to resume if loading the checkpoint could run code: an untrusted recipe may name its own checkpoint.

    Args:
        weights_only: option of this name; torch loads only tensors and plain values, unless it is False.
        strategy: strategy of the trainer; Lightning's own FSDP, DeepSpeed and ModelParallelStrategy unpickle
            checkpoints themselves.

    Raises:
        RecipeError: the user has not allowed ``pickle``.
    """
    from lightning.pytorch.strategies import Strategy

    reads = type(strategy).load_checkpoint
    by_checkpoint_io = reads is Strategy.load_checkpoint
    own = allowed_by_user()
    if "pickle" in own:
        return
    if weights_only is False:
        raise RecipeError(f"weights_only=false lets a checkpoint run code; leave it out, or add {OPTION} pickle")
    if not by_checkpoint_io and not is_allowed(reads.__module__, ["lit_ft", *own]):
        name = f"{type(strategy).__module__}.{type(strategy).__name__}"
        raise RecipeError(
            f"trainer.strategy={name} lets a checkpoint run code as it reads it; take lit_ft.strategies' FSDPStrategy, "
            f"DeepSpeedStrategy or ModelParallelStrategy, or, if you trust the checkpoint, add {OPTION} pickle"
        )


def _from_environment() -> list[str]:
    value = os.environ.get(VARIABLE, "")
    return _checked(value.split(","), VARIABLE) if value else []


def _from_settings() -> list[str]:
    file = settings_file()
    if not file.is_file():
        return []
    import yaml

    from lit_ft.bounded_yaml import load_yaml

    try:
        settings = load_yaml(file.read_text(encoding="utf-8")) or {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise RecipeError(f"{file}: cannot be read ({' '.join(str(error).split())}); fix or remove it") from error
    modules = settings.get("allow_code", []) if isinstance(settings, dict) else None
    if not isinstance(modules, list) or set(settings) - {"allow_code"}:
        raise RecipeError(f"{file}: has one key, allow_code, with a list of modules, e.g. allow_code: [my_package]")
    return _checked([str(module) for module in modules], str(file))


def _checked(modules: list[str], origin: str) -> list[str]:
    for module in modules:
        if not all(part.isidentifier() for part in module.split(".")) or module.split(".")[0] == "jsonargparse":
            raise RecipeError(f"{origin}: {module!r} is no module to be allowed; name one, e.g. my_package")
    return modules
