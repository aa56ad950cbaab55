"""Attention sinks: a learned logit of each head that has a share of its softmax and no value (gpt-oss, MiMo).

Kernels of attention know no sinks, but return the logarithms of the sums in their softmax. With them, the share that a
sink takes scales the output. In the backward pass the kernels compute probabilities from these logarithms, so those
that have the sinks in them give the gradients of q, k and v. A sink has no value, so the gradient of its logit is minus
the sum of its probability times the output's product with the gradient.

Shapes: q ``(1, heads, T, head_dim)``, k and v ``(1, kv_heads, S, head_dim)``, sinks ``(heads,)``, result ``(1, heads,
T, head_dim)``.
"""

from typing import Any

import torch
from torch import Tensor

from lit_ft.model.attention import segments, varlen
from lit_ft.model.attention.varlen import Boundaries


def attend_with_sinks(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, within: Boundaries, scaling: float | None, window: int | None
) -> Tensor:
    """Causal attention within each segment.

    Args:
        within: the segments; on a CPU those of keys are those of queries.
        scaling: factor on attention logits; None for 1 / sqrt(head_dim).
        window: number of tokens that a position attends to, itself included; None for its full segment.
    """
    out = _WithSinks.apply(q, k, v, sinks, *within, scaling, window)
    assert isinstance(out, Tensor)
    return out


class _WithSinks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor,
        ends: Tensor,
        longest: int,
        key_ends: Tensor | None,
        longest_keys: int | None,
        scaling: float | None,
        window: int | None,
    ) -> Tensor:
        if q.device.type == "cpu":
            out, log_sums = segments.forward(q, k, v, ends, scaling, window)
        else:
            within = Boundaries(ends, longest, key_ends, longest_keys)
            out, log_sums = varlen.forward(q, k, v, within, scaling, window)
        with_sinks = torch.logaddexp(log_sums, sinks.to(log_sums.dtype)[:, None])
        out = out * (log_sums - with_sinks).exp()[..., None]
        if out.dtype != q.dtype:  # compiled by torch 2.11, the result of a cast to its own dtype has no gradients
            out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, with_sinks, ends, key_ends)
        ctx.longest, ctx.options = (longest, longest_keys), (scaling, window)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, log_sums, ends, key_ends = ctx.saved_tensors
        grad = grads[0]
        if q.device.type == "cpu":
            of_inputs = segments.backward(grad, q, k, v, out, log_sums, ends, *ctx.options)
        else:
            within = Boundaries(ends, ctx.longest[0], key_ends, ctx.longest[1])
            of_inputs = varlen.backward(grad, q, k, v, out, log_sums, within, *ctx.options)
        wide = log_sums.dtype
        of_sinks = (sinks.to(wide)[:, None] - log_sums).exp() * (grad.to(wide) * out.to(wide)).sum(-1)
        return *of_inputs, -of_sinks.sum((0, 2)).to(sinks.dtype), *[None] * 6
