"""The autograd function of fused LoRA: products of linear layers with the same input, and their gradients.

Both products of a layer add up in one buffer. The backward pass keeps the input as it is and ``x A^T``, which has only
the rank's columns.

Legend: T tokens, I inputs and O outputs of a layer, R rank; of several layers, their ranks side by side.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class AdaptedLayer(NamedTuple):
    """What the function is given of a layer, in this order."""

    weight: Tensor
    bias_O: Tensor | None
    a_RI: Tensor
    b_OR: Tensor
    scaling: float
    dequantize: Callable[[Tensor], Tensor] | None


class LoraProducts(torch.autograd.Function):
    """``x W^T + bias + scaling (x A^T) B^T`` of each layer; with dropout, ``dropped`` is the second ``x``."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dropped: Tensor | None, keeps_products: bool, *of_layers: Any
    ) -> tuple[Tensor, ...]:
        """Outputs of the layers, each ``(..., O)``, in the dtype of ``x``.

        Args:
            x: input of all layers, ``(..., I)``.
            dropped: ``x`` after dropout, for the adapter of a single layer; None without dropout.
            keeps_products: whether activation checkpointing keeps the results of matrix products.
            of_layers: the fields of an ``AdaptedLayer`` for each layer, one after another, as autograd reads them.
        """
        layers = _layers(of_layers)
        if not torch.compiler.is_compiling():
            ctx.set_materialize_grads(False)  # the weights of an output that nothing reads have no gradients
        source = x if dropped is None else dropped
        inputs = x.shape[-1]
        x_TI = x.reshape(-1, inputs)
        a_RI = torch.cat([layer.a_RI for layer in layers]) if len(layers) > 1 else layers[0].a_RI
        a_RI = a_RI.to(x.dtype)
        h_TR = source.reshape(-1, inputs) @ a_RI.T
        ctx.ranks = [len(layer.a_RI) for layer in layers]
        ctx.scalings, ctx.dequantize = [layer.scaling for layer in layers], [layer.dequantize for layer in layers]
        weights, scaled, outputs = [], [], []
        for layer, h in zip(layers, h_TR.split(ctx.ranks, dim=1), strict=True):
            weight_OI = _dense(layer.weight, layer.dequantize, x.dtype)
            scaled_b_OR = (layer.b_OR * layer.scaling).to(x.dtype)
            weights.append(weight_OI if layer.dequantize is None else layer.weight)
            scaled.append(scaled_b_OR)
            outputs.append(_sum_of_products(x, x_TI, weight_OI, layer.bias_O, h, scaled_b_OR, keeps_products))
        ctx.save_for_backward(source, h_TR, a_RI, *weights, *scaled)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients of the inputs of ``forward``, in their order; those of A, B and biases are in float32."""
        source, h_TR, a_RI, *weights_and_scaled = ctx.saved_tensors
        count = len(grads)
        weights, scaled = weights_and_scaled[:count], weights_and_scaled[count:]
        for_x, for_dropped = ctx.needs_input_grad[:2]
        needed = _layers(ctx.needs_input_grad[3:])
        is_read = [grad is not None for grad in grads]
        given = (
            b.new_zeros(len(h_TR), len(b)) if grad is None else grad for grad, b in zip(grads, scaled, strict=True)
        )
        grads_TO = [grad.reshape(-1, grad.shape[-1]) for grad in given]
        products = [grad_TO @ scaled_b_OR for grad_TO, scaled_b_OR in zip(grads_TO, scaled, strict=True)]
        grad_h_TR = torch.cat(products, dim=1) if count > 1 else products[0]
        grad_x = grad_dropped = None
        if for_dropped:
            grad_dropped = (grad_h_TR @ a_RI).view(source.shape)
        elif for_x:
            grad_x = grad_h_TR @ a_RI
        for grad_TO, weight, dequantize in zip(grads_TO, weights, ctx.dequantize, strict=True):
            if for_x:
                weight_OI = _dense(weight, dequantize, source.dtype)
                grad_x = grad_TO @ weight_OI if grad_x is None else _add_product(grad_x, grad_TO, weight_OI)
        of_a: Sequence[Tensor | None] = [None] * count
        if any(layer.a_RI for layer in needed):
            of_a = _product_in_float32(grad_h_TR.T, source.reshape(-1, source.shape[-1])).split(ctx.ranks)
        found: list[Tensor | None] = []
        parts = zip(needed, is_read, grads_TO, of_a, h_TR.split(ctx.ranks, dim=1), ctx.scalings, strict=True)
        for layer, has_gradient, grad_TO, grad_a, h, scaling in parts:
            grad_bias = grad_TO.sum(0, dtype=torch.float32) if layer.bias_O else None
            grad_b = _product_in_float32(grad_TO.T, h) * scaling if layer.b_OR else None
            of_layer = [None, grad_bias, grad_a if layer.a_RI else None, grad_b, None, None]
            found += of_layer if has_gradient else [None] * len(of_layer)
        return None if grad_x is None else grad_x.view(source.shape), grad_dropped, None, *found


def _layers(parts: Sequence[Any]) -> list[AdaptedLayer]:
    """What a function is given of each layer, from what it is given of all."""
    size = len(AdaptedLayer._fields)
    return [AdaptedLayer(*parts[start : start + size]) for start in range(0, len(parts), size)]


def _dense(weight: Tensor, dequantize: Callable[[Tensor], Tensor] | None, dtype: torch.dtype) -> Tensor:
    return (weight if dequantize is None else dequantize(weight)).to(dtype)


def _sum_of_products(
    x: Tensor, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, h_TR: Tensor, b_OR: Tensor, keeps_products: bool
) -> Tensor:
    """``x W^T + bias + h B^T``, in the shape of ``x``."""
    # The small product first: it is rounded to bfloat16 once more, and a rounding of the sum would cost more.
    # With `out`, selective checkpointing does not keep it, but the sum alone.
    # Models may change the result in place, which autograd forbids for a view: `out` is none, nor is an unsafe one.
    out = x.new_empty(*x.shape[:-1], len(weight_OI))
    out_TO = out.view(-1, len(weight_OI))
    if bias_O is None:
        torch.mm(h_TR, b_OR.T, out=out_TO)
    else:
        torch.addmm(bias_O.to(x.dtype), h_TR, b_OR.T, out=out_TO)
    if keeps_products:
        total_TO = torch.addmm(out_TO, x_TI, weight_OI.T)
        return torch.ops.aten._unsafe_view.default(total_TO, out.shape)
    _add_product(out_TO, x_TI, weight_OI.T)
    return out


torch.library.define("lit_ft::add_product", "(Tensor(a!) total, Tensor a, Tensor b) -> ()")


@torch.library.impl("lit_ft::add_product", "CompositeExplicitAutograd")
def _add_in_graph(total: Tensor, a: Tensor, b: Tensor) -> None:
    total.addmm_(a, b)


@torch.library.register_fake("lit_ft::add_product")
def _(total: Tensor, a: Tensor, b: Tensor) -> None:
    """The operator in a traced graph: it changes no shape and returns nothing."""


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """``total.addmm_(a, b)``; in a graph an operator, for Inductor would copy ``total`` first (torch 2.13)."""
    if torch.compiler.is_compiling():
        torch.ops.lit_ft.add_product(total, a, b)
        return total
    return total.addmm_(a, b)


def _product_in_float32(a: Tensor, b: Tensor) -> Tensor:
    """Product of two matrices, a sum over tokens, that is not rounded to float16 or bfloat16."""
    if a.dtype.itemsize >= torch.float32.itemsize:
        return a @ b
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()
