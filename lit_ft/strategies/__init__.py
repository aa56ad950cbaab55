"""Strategies for the Lightning Trainer: how a model and its optimizer are distributed over devices."""

from importlib import import_module
from typing import Any

_HOMES = {
    "DeepSpeedStrategy": "deepspeed",
    "FSDPStrategy": "fsdp",
    "ModelParallelStrategy": "model_parallel",
}
__all__ = ["DeepSpeedStrategy", "FSDPStrategy", "ModelParallelStrategy"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
