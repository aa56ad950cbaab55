"""Attention to the segments of a packed batch in one call: torch's variable-length flash attention, on CUDA.

Shapes: q ``(1, heads, T, head_dim)``, k and v ``(1, kv_heads, S, head_dim)``, result ``(1, heads, T, head_dim)``.
"""

from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.varlen import AuxRequest, varlen_attn

from lit_ft.internals.torch import varlen_backward

GROUPS_HEADS = "enable_gqa" in signature(varlen_attn).parameters
"""Whether several heads of queries may share keys and values; with torch 2.11 they are repeated."""


class Boundaries(NamedTuple):
    """Segments of queries, and of the keys that they attend to."""

    ends: Tensor
    """Where the segments of queries end, after a 0, ``(segments + 1,)``, int32."""
    longest: int
    """Tokens of the longest segment of queries, or more."""
    key_ends: Tensor | None = None
    """Where those of keys end, if it is not where those of queries do."""
    longest_keys: int | None = None


def takes_varlen(query: Tensor, value: Tensor, dropout: float = 0.0) -> bool:
    """Whether ``varlen_attn`` computes these inputs: FlashAttention-2 does, in half precision, from Ampere on.

    Values narrower than keys (multi-head latent attention) are padded to their width. Heads narrower than a multiple of
    8 (SDPA pads them) or wider than 256 go segment by segment (``mha_varlen_fwd``, torch 2.11 to 2.13).
    """
    width = query.shape[-1]
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and not dropout
        and width % 8 == 0
        and width <= 256
        and value.shape[-1] <= width
        and _has_flash_attention(query.device)
    )


@torch.compiler.assume_constant_result
def _has_flash_attention(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 0)


def forward(
    q: Tensor, k: Tensor, v: Tensor, within: Boundaries, scaling: float | None, window: int | None
) -> tuple[Tensor, Tensor]:
    """Causal attention within each segment, and the logarithms of the sums in its softmax, ``(1, heads, T)``, fp32.

    Args:
        within: the segments; queries are at the end of theirs.
        scaling: factor on attention logits; None for 1 / sqrt(head_dim).
        window: number of tokens that a position attends to, itself included; None for its full segment.
    """
    size = _window_size(window)
    options: dict[str, Any] = {"return_aux": AuxRequest(lse=True), "scale": scaling, "window_size": size}
    if q.shape[1] > k.shape[1]:
        options["enable_gqa"] = True
    q_rows, k_rows, v_rows = _rows(q, k, v)
    out, log_sums = varlen_attn(q_rows, k_rows, v_rows, *_ends(within), *_longest(within), **options)
    return out.transpose(0, 1)[None], log_sums[None]


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_sums: Tensor,
    within: Boundaries,
    scaling: float | None,
    window: int | None,
) -> tuple[Tensor, ...]:
    """Gradients of q, k and v, from the results of ``forward`` and the gradient of the first of them."""
    rows = _rows(grad, q, k, v, out)
    found = varlen_backward(rows, log_sums[0], _ends(within), _longest(within), scaling, _window_size(window))
    return tuple(one.transpose(0, 1)[None] for one in found)


def _ends(within: Boundaries) -> tuple[Tensor, Tensor]:
    return within.ends, within.ends if within.key_ends is None else within.key_ends


def _longest(within: Boundaries) -> tuple[int, int]:
    return within.longest, within.longest if within.longest_keys is None else within.longest_keys


def _window_size(window: int | None) -> tuple[int, int]:
    return (-1 if window is None else window - 1, 0)


def _rows(*tensors: Tensor) -> list[Tensor]:
    """Tensors ``(1, heads, T, head_dim)`` as the kernel takes them, ``(T, heads, head_dim)``."""
    return [tensor[0].transpose(0, 1) for tensor in tensors]
