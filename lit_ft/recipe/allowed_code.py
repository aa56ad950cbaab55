"""Python code that a recipe may name: an allow-list of packages, and what the user adds to it.

Importing a module runs it, so this is decided by name, before the import. A recipe cannot extend the list: only the
command line, the environment and the user's own settings file can.
"""

import os
from pathlib import Path
from typing import Any

from lit_ft.errors import RecipeError

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
)
"""Packages whose classes every recipe may name."""

VARIABLE = "LIT_FT_ALLOW_CODE"
"""Modules that the user allows, separated by commas; processes that this one starts inherit it."""

OPTION = "--allow_code"

_granted: set[str] = set()


def settings_file() -> Path:
    """The user's own settings, ``$XDG_CONFIG_HOME/lit_ft/settings.yaml``."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "lit_ft" / "settings.yaml"


def take_option(arguments: list[str]) -> list[str]:
    """Take ``--allow_code MODULE`` out of a command line and remember what it allows, here and in started processes.

    Raises:
        RecipeError: no module follows, or it is no module's name.
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
    if modules:
        os.environ[VARIABLE] = ",".join(dict.fromkeys([*_from_environment(), *modules]))
    return rest


def allowed_by_user() -> list[str]:
    """Modules that the command line, the environment and the settings file allow.

    Raises:
        RecipeError: the settings file cannot be used, or a name is no module's.
    """
    return [*_from_environment(), *_from_settings()]


def is_allowed(path: str, prefixes: tuple[str, ...] | list[str] = PACKAGES) -> bool:
    """Whether a dotted path is one of the modules, or within one."""
    return any(path == prefix or path.startswith(f"{prefix}.") for prefix in prefixes)


def enforce() -> None:
    """Let jsonargparse import what is allowed only; by name first, then by where it is defined."""
    from jsonargparse import set_parsing_settings

    modules = allowed_by_user()
    denied = ["*", *_WITHIN_PACKAGES, *_granted.difference(modules, PACKAGES)]
    set_parsing_settings(import_path_denylist=denied, import_path_allowlist=[*PACKAGES, *modules])
    _granted.update(modules)


_WITHIN_PACKAGES = ("torch.hub", "torch.load", "torch.package", "torch.utils.cpp_extension", "torch.serialization")
"""Parts of the packages that exist to run or load code; the type of an option refuses others."""


def refusal(path: str, key: str = "") -> RecipeError:
    """The error for code that nobody has allowed.

    Args:
        path: what the recipe names.
        key: where the recipe names it.
    """
    if is_allowed(path):
        module, reason = path, "is no optimizer, callback or other class that options of a recipe take"
    else:
        module, reason = path.split(".")[0], f"is code outside of the packages of every recipe ({', '.join(PACKAGES)})"
    return RecipeError(
        f"{f'{key}: ' if key else ''}{path!r} {reason}; if you know and trust that code, add {OPTION} {module} to the "
        f"command, or {module} to the list allow_code in {settings_file()}"
    )


def check_unpickling(weights_only: bool | None, strategy: Any) -> None:
    """Refuse to resume where a checkpoint could run code: a recipe may come with the checkpoint that it names.

    Args:
        weights_only: the option of this name; torch reads tensors and plain values alone, unless it is False.
        strategy: the trainer's; Lightning's own FSDP, DeepSpeed and ModelParallelStrategy unpickle by themselves.

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
        raise RecipeError(f"{file}: cannot be read ({' '.join(str(error).split())}); mend or remove it") from error
    modules = settings.get("allow_code", []) if isinstance(settings, dict) else None
    if not isinstance(modules, list) or set(settings) - {"allow_code"}:
        raise RecipeError(f"{file}: has one key, allow_code, with a list of modules, e.g. allow_code: [my_package]")
    return _checked([str(module) for module in modules], str(file))


def _checked(modules: list[str], origin: str) -> list[str]:
    for module in modules:
        if not all(part.isidentifier() for part in module.split(".")) or module.split(".")[0] == "jsonargparse":
            raise RecipeError(f"{origin}: {module!r} is no module to be allowed; name one, e.g. my_package")
    return modules
