"""Tokens that samples share, repeated for each of them; gradients of a token are added up in fp32 or wider."""

from typing import Any

import torch
from torch import Tensor


def repeated(tensor: Tensor, places: Tensor, dimension: int) -> Tensor:
    """The tokens of a packed batch from those that are computed, along a dimension: T' become T."""
    result = _Repeated.apply(tensor, places, dimension)
    assert isinstance(result, Tensor)
    return result


class _Repeated(torch.autograd.Function):
    """``index_select``, whose own backward pass adds up in the dtype of the tensor: bf16 rounds each sum."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, places: Tensor, dimension: int) -> Tensor:
        ctx.save_for_backward(places)
        ctx.dimension, ctx.shape = dimension, tensor.shape
        return tensor.index_select(dimension, places)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (places,), grad = ctx.saved_tensors, grads[0]
        wide = torch.promote_types(grad.dtype, torch.float32)
        total = torch.zeros(ctx.shape, dtype=wide, device=grad.device)
        return total.index_add_(ctx.dimension, places, grad.to(wide)).to(grad.dtype), None, None
