"""Strategies for the Lightning Trainer: how a model and its optimizer are distributed over devices."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_ft.strategies.deepspeed import DeepSpeedStrategy
    from lit_ft.strategies.fsdp import FSDPStrategy
    from lit_ft.strategies.model_parallel import ModelParallelStrategy

_HOMES = {"DeepSpeedStrategy": "deepspeed", "FSDPStrategy": "fsdp", "ModelParallelStrategy": "model_parallel"}
__all__ = ["DeepSpeedStrategy", "FSDPStrategy", "ModelParallelStrategy"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
