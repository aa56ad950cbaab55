"""Checks that weights have no NaN or infinite values."""

from collections.abc import Iterator, Mapping
from typing import Protocol, runtime_checkable

import torch
from lightning.pytorch.strategies import Strategy
from lit_callbacks.distributed.gather import is_zero3, part_of_zero3
from torch import Tensor, nn

from lit_ft.errors import RecipeError
from lit_ft.gradient_norm import local


def check_base(model: nn.Module, pretrained: str) -> None:
    """Refuse base weights that are not finite.

    Raises:
        RecipeError: a tensor is not finite; the message names it.
    """
    weights = model.state_dict(keep_vars=True)
    bad = next(not_finite(weights), None)
    # If ZeRO-3 has sharded them as they were read, all ranks must continue or fail together.
    if _on_any_rank(bad is not None) if any(map(is_zero3, weights.values())) else bad is not None:
        raise _of_base(pretrained, bad)


def _on_any_rank(is_so: bool) -> bool:
    flags = [is_so] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(flags, is_so)  # not a tensor beside the shards: NCCL takes none in host memory
    return any(flags)


def check_split_base(strategy: Strategy, module: nn.Module, pretrained: str) -> None:
    """Refuse base weights that are not finite, if each rank has read its shards only; a collective.

    Raises:
        RecipeError: a tensor is not finite; the rank that holds it names it.
    """
    packed = _packed_weights(module)
    bad = next(not_finite({n: p for n, p in module.named_parameters() if n not in packed}), None)
    if not strategy.reduce_boolean_decision(bad is None, all=True):
        raise _of_base(pretrained, bad)


def _of_base(pretrained: str, bad: str | None) -> RecipeError:
    what = "a weight of another rank has" if bad is None else f"the weight {bad} has"
    return RecipeError(
        f"model.pretrained={pretrained!r}: {what} values that are NaN or infinite, so every loss would be NaN; "
        "download the model again, or name another checkpoint"
    )


def _packed_weights(module: nn.Module) -> set[str]:
    """Names of weights that are 4-bit codes, which may be stored in a float dtype so that they can be sharded."""
    from bitsandbytes.nn import Linear4bit

    return {f"{name}.weight" for name, part in module.named_modules() if isinstance(part, Linear4bit)}


def not_finite(tensors: Mapping[str, object]) -> Iterator[str]:
    """Names of tensors with NaN or infinite values; of sharded tensors only this rank's shard is checked."""
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor) and not all(map(_is_finite, _numbers_of(tensor))):
            yield name


class _Scales(Protocol):
    """Scales of blocks of 4-bit weights (bitsandbytes' ``QuantState``), which may be quantized themselves."""

    absmax: Tensor
    offset: Tensor | None
    state2: "_Scales | None"


@runtime_checkable
class _In4Bits(Protocol):
    """Weight of bitsandbytes in 4 bits (``Params4bit``)."""

    quant_state: _Scales | None


@runtime_checkable
class _In8Bits(Protocol):
    """Weight of bitsandbytes in 8 bits (``Int8Params``)."""

    SCB: Tensor | None


def _numbers_of(tensor: Tensor) -> Iterator[Tensor]:
    """Floating-point tensors that a tensor consists of: itself, or the scales of its quantized blocks."""
    state = tensor.quant_state if isinstance(tensor, _In4Bits) else None
    scales = [tensor.SCB if isinstance(tensor, _In8Bits) else None]
    if state is not None:
        scales += [state.absmax, state.offset, None if state.state2 is None else state.state2.absmax]
    part = (part_of_zero3(tensor) if is_zero3(tensor) else local(tensor)).detach()
    inner = part.__tensor_flatten__()[0] if hasattr(part, "__tensor_flatten__") else []  # torchao's
    parts = [] if state is not None else [getattr(part, name) for name in inner] or [part]
    yield from (one for one in [*parts, *scales] if isinstance(one, Tensor) and one.is_floating_point())


def _is_finite(tensor: Tensor) -> bool:
    if tensor.device.type == "meta" or not tensor.numel():
        return True
    if tensor.dtype.itemsize == 1:  # float8 has no order
        tensor = tensor.to(torch.float32)
    # Minimum and maximum are NaN if any value is. aminmax() takes no memory, and a twentieth of the time of isfinite()
    # on a CPU.
    low, high = tensor.aminmax()
    return bool(low.isfinite() & high.isfinite())
