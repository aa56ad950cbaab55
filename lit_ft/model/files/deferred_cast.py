"""Deferred cast of weights, so that they stay memory-mapped until a strategy shards them.

transformers maps weights into memory without reading them, as long as their dtype is the file's. A strategy that
shards layers therefore loads the file's dtype first, and casts a layer just before it is sharded: no rank ever holds
more than its shards and one layer.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn

_is_wanted = ContextVar("_is_wanted", default=False)


@contextmanager
def casting_later() -> Iterator[None]:
    """Context in which base models are loaded in the dtype of their files."""
    token = _is_wanted.set(True)
    try:
        yield
    finally:
        _is_wanted.reset(token)


def is_wanted() -> bool:
    """Whether the current strategy casts weights later."""
    return _is_wanted.get()


def mark(model: nn.Module, outline: nn.Module) -> None:
    """Store the final dtypes of a model's weights as their attribute ``cast_to``, and give its buffers theirs now.

    Args:
        model: model with the dtype of its files.
        outline: the same model with its final dtypes, on the meta device. Buffers that are not there are taken over.
    """
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and parameter.dtype != (dtype := outline.get_parameter(name).dtype):
            parameter.cast_to = dtype  # type: ignore[attr-defined]
    for name, buffer in model.named_buffers():
        if buffer.dtype != (final := outline.get_buffer(name)).dtype:
            buffer.data = (buffer if final.is_meta else final).to(buffer.device, final.dtype)


def final_dtype(tensor: Tensor) -> torch.dtype | None:
    """Dtype that a weight must be cast to later; None if it has its final dtype."""
    return getattr(tensor, "cast_to", None)


def is_marked(model: nn.Module) -> bool:
    """Whether a model has weights that must be cast later."""
    return any(final_dtype(parameter) is not None for parameter in model.parameters())


def cast(module: nn.Module) -> None:
    """Cast a module's weights to their stored final dtype."""
    for parameter in module.parameters():
        if (dtype := final_dtype(parameter)) is not None:
            parameter.data = parameter.data.to(dtype)


@contextmanager
def cast_meanwhile(module: nn.Module) -> Iterator[None]:
    """Context in which a module's weights have their final dtype; afterwards they are those of their files again."""
    kept = [(parameter, parameter.data) for parameter in module.parameters() if final_dtype(parameter) is not None]
    cast(module)
    try:
        yield
    finally:
        for parameter, data in kept:
            parameter.data = data
