"""Weights that stay in their file until a strategy has split them.

transformers maps weights into memory without reading them, as long as their dtype is the file's. A strategy that
gives each rank its share of a layer therefore asks for the file's dtype first, and casts a layer just before it is
split: no rank ever holds more than its share and one layer.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import nn

_is_wanted = ContextVar("_is_wanted", default=False)


@contextmanager
def casting_later() -> Iterator[None]:
    """Within it, base models are loaded in the dtype of their files."""
    token = _is_wanted.set(True)
    try:
        yield
    finally:
        _is_wanted.reset(token)


def is_wanted() -> bool:
    """Whether the caller's strategy casts later."""
    return _is_wanted.get()


def mark(model: nn.Module, dtype: torch.dtype) -> None:
    """Note the dtype that a model's floating-point weights are to have."""
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.dtype != dtype:
            parameter.cast_to = dtype  # type: ignore[attr-defined]


def is_marked(model: nn.Module) -> bool:
    """Whether a model has weights that are to be cast."""
    return any(hasattr(parameter, "cast_to") for parameter in model.parameters())


def cast(module: nn.Module) -> None:
    """Bring a module's weights into the dtype that was noted."""
    for parameter in module.parameters():
        if (dtype := getattr(parameter, "cast_to", None)) is not None:
            parameter.data = parameter.data.to(dtype)


@contextmanager
def cast_meanwhile(module: nn.Module) -> Iterator[None]:
    """Within it, a module's weights have the dtype that was noted; afterwards they are those of their files again."""
    kept = [(parameter, parameter.data) for parameter in module.parameters() if hasattr(parameter, "cast_to")]
    cast(module)
    try:
        yield
    finally:
        for parameter, data in kept:
            parameter.data = data
