"""Attention to the samples of a packed batch as one operator, which torch.compile keeps in a layer's graph.

The boundaries of the samples are a tensor there, so that a graph serves any number of samples of any lengths. On CUDA
the operator is torch's own variable-length attention. This one is for CPUs: it reads the boundaries, which are in host
memory, and calls the kernel that SDPA takes for each sample, forward and backward. Its results are those of SDPA.

Shapes: q ``(1, heads, T, head_dim)``, k and v ``(1, kv_heads, T, head_dim)``, result ``(1, heads, T, head_dim)``.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from lit_callbacks.distributed.host_copy import queued_copy
from torch import Tensor

from lit_ft.internals.torch import attention_backward_for_cpu, attention_for_cpu

# The kernel's bf16 backward is slow on short segments: 1.3 ms at 50 tokens and 14 heads against 0.4 ms in fp32, casts
# included; from 256 tokens on bf16 wins (python -m benchmarks.speed.attention).
CPU_FP32_BELOW = 256


LEAST_SAMPLES, LEAST_TOKENS = 32, 512
"""Least number of samples, and tokens of the longest one, in batches of few shapes.

Empty samples, and blocks of 128 tokens beyond the end of a sample, end at once in the kernel.
"""


class Segments(NamedTuple):
    """Boundaries of the samples of a packed batch, as a compiled or recorded layer takes them."""

    ends: Tensor | None
    """Where samples end, after a 0, ``(samples + 1,)``, int32, on the device of the batch; None for one length."""
    longest: int
    """Tokens of the longest sample, or more; of each sample without ``ends``."""


def segments_of(lengths: Sequence[int], device: torch.device, has_few_shapes: bool = False) -> Segments:
    """Boundaries of samples, on the device of the batch; none where all have one length.

    Args:
        has_few_shapes: whether the number of samples and the longest one are raised to powers of two, and to
            ``LEAST_SAMPLES`` and ``LEAST_TOKENS``. Samples that are added are empty. CUDA graphs are recorded once for
            each shape and number. Samples of one length have boundaries then, too, below ``LEAST_TOKENS``.
    """
    longest, ends = max(lengths), [0, *accumulate(lengths)]
    if longest == min(lengths) and (longest >= LEAST_TOKENS or not has_few_shapes):
        return Segments(None, longest)
    if has_few_shapes:
        longest = min(max(_power_of_two(longest), LEAST_TOKENS), ends[-1])
        ends += ends[-1:] * (max(_power_of_two(len(lengths)), LEAST_SAMPLES) - len(lengths))
    return Segments(queued_copy(torch.tensor(ends, dtype=torch.int32), device), longest)


def _power_of_two(number: int) -> int:
    """Smallest power of two that is not below ``number``."""
    return 1 << (number - 1).bit_length()


def takes_segments(q: Tensor, v: Tensor, dropout: float) -> bool:
    """Whether ``attend`` computes these inputs, with values padded to the width of keys: on a CPU, without dropout."""
    return q.device.type == "cpu" and not dropout and q.shape[-1] >= v.shape[-1]


def attend(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, scaling: float | None, window: int | None) -> Tensor:
    """Causal attention within each segment, on a CPU.

    Args:
        ends: ``Segments.ends``.
        scaling: factor on attention logits; None for 1 / sqrt(head_dim).
        window: number of tokens that a position attends to, itself included; None for its full segment.
    """
    out, _ = forward(q, k, v, ends, scaling, window)
    return out


@torch.library.custom_op("lit_ft::attend_to_segments", mutates_args=(), device_types="cpu")
def forward(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor, scaling: float | None, window: int | None
) -> tuple[Tensor, Tensor]:
    """Attention, and the logarithms of the sums in its softmax, ``(1, heads, T)``, fp32; in fp64 of inputs in fp64."""
    out, log_sums = torch.empty_like(q), _empty_sums(q)
    for part, mask in _parts(ends, window, q.dtype):
        computed_in = _dtype_of(part, q.dtype)
        result, log_sum = attention_for_cpu(
            *(one[:, :, part].to(computed_in) for one in (q, k, v)),
            0.0,
            mask is None,
            attn_mask=None if mask is None else mask.to(computed_in),
            scale=scaling,
        )
        out[:, :, part], log_sums[:, :, part] = result, log_sum
    return out, log_sums


@forward.register_fake
def _(q: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), _empty_sums(q)


def _empty_sums(q: Tensor) -> Tensor:
    return q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))


@torch.library.custom_op("lit_ft::attend_to_segments_backward", mutates_args=(), device_types="cpu")
def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_sums: Tensor,
    ends: Tensor,
    scaling: float | None,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    gradients = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    for part, mask in _parts(ends, window, q.dtype):
        computed_in = _dtype_of(part, q.dtype)
        of_parts = attention_backward_for_cpu(
            *(one[:, :, part].to(computed_in) for one in (grad, q, k, v, out)),
            log_sums[:, :, part].transpose(1, 2).contiguous().transpose(1, 2),  # the layout that the kernel returns
            0.0,
            mask is None,
            attn_mask=None if mask is None else mask.to(computed_in),
            scale=scaling,
        )
        for gradient, of_part in zip(gradients, of_parts, strict=True):
            gradient[:, :, part] = of_part
    return gradients


@backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _parts(ends: Tensor, window: int | None, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor | None]]:
    """Tokens of each segment, and the mask to add to its attention logits; None for all tokens before."""
    for start, end in pairwise(ends.tolist()):
        if (length := end - start) == 0:
            continue
        mask = None
        if window is not None and length > window:
            back = torch.arange(length)[:, None] - torch.arange(length)
            mask = torch.zeros(length, length, dtype=dtype).masked_fill((back < 0) | (back >= window), -torch.inf)
        yield slice(start, end), mask


def _dtype_of(part: slice, dtype: torch.dtype) -> torch.dtype:
    is_slow = dtype == torch.bfloat16 and part.stop - part.start < CPU_FP32_BELOW
    return torch.float32 if is_slow and not torch.is_autocast_enabled("cpu") else dtype


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ends, ctx.scaling, ctx.window = inputs
    ctx.save_for_backward(q, k, v, *output, ends)


def _gradients(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, out, log_sums, ends = ctx.saved_tensors
    gradients = backward(grad, q, k, v, out, log_sums, ends, ctx.scaling, ctx.window)
    return *gradients, None, None, None


forward.register_autograd(_gradients, setup_context=_keep)
