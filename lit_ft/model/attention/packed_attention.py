"""Block-diagonal causal attention over a packed batch, as a Hugging Face attention function.

Registered with transformers' ``AttentionInterface`` under ``PACKED``, so that models stay unmodified.
No mask is built: causal attention is computed within each sample (segment) of the packed batch. On CUDA several
segments are one variable-length flash-attention call where it applies (``takes_varlen``). Segments of one length, a
single one included, and each segment elsewhere, are an SDPA call, which chooses the fastest kernel of the device. In a
graph of torch.compile the boundaries of the segments are a tensor (``Segments``), and attention is one operator. So it
is with attention sinks, which SDPA does not know (``attend_with_sinks``).

Shapes: q ``(1, heads, T, head_dim)``, k and v ``(1, kv_heads, T, head_dim)``, result ``(1, T, heads, head_dim)``.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from lit_callbacks.distributed.host_copy import queued_copy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface

from lit_ft.errors import RecipeError
from lit_ft.model.attention import varlen
from lit_ft.model.attention.repeated import repeated
from lit_ft.model.attention.segments import CPU_FP32_BELOW, Segments, attend, takes_segments
from lit_ft.model.attention.sinks import attend_with_sinks
from lit_ft.model.attention.varlen import Boundaries, takes_varlen
from lit_ft.model.isolation import lengths as current_lengths
from lit_ft.model.isolation.lengths import SharedTokens

PACKED = "lit_ft_packed"


@runtime_checkable
class AttendsToAllRanks(Protocol):
    """Attention layer of which each rank has a part of the tokens (context parallelism)."""

    context_mesh: DeviceMesh


@runtime_checkable
class AttendsInChunks(Protocol):
    """Attention layer of which each token attends to those of its chunk alone; chunks start anew with each sample."""

    tokens_of_chunk: int


class Variant(NamedTuple):
    """What a layer's attention differs in from softmax over all tokens before."""

    dropout: float = 0.0
    scaling: float | None = None
    """Factor on attention logits; None for 1 / sqrt(head_dim)."""
    window: int | None = None
    """Number of tokens that a position attends to, itself included; None for its full segment."""
    sinks: Tensor | None = None
    """Logits ``(heads,)`` that take a share of the softmax and have no value; None for none."""


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    segment_lengths: list[int] | None = None,
    segments: Segments | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Causal attention within each segment of a packed batch.

    Args:
        segment_lengths: lengths of the samples in the packed batch, passed through the model's keyword arguments; some
            architectures do not pass them on, and then it is those that are set for the batch.
        segments: their boundaries, for a compiled layer.
        sliding_window: number of tokens that a position attends to, itself included; None for its full segment.
        s_aux: attention sinks ``(heads,)``, as transformers calls them.

    Raises:
        RecipeError: the model needs a variant that is not supported, or was called without a packed batch.
    """
    if softcap is not None:
        raise RecipeError(
            "this architecture caps its attention logits, which packed attention does not compute; set "
            "model.attn_implementation to eager"
        )
    query, key, value = _in_one_dtype(query, key, value)
    variant = Variant(dropout, scaling, sliding_window, s_aux)
    if segments is not None and attention_mask is None:
        is_whole = not hasattr(module, "context_mesh") and not hasattr(module, "tokens_of_chunk")
        if is_whole and _fits_a_graph(query, value, segments, variant):
            return _in_graph(query, key, value, segments, variant), None
    return _by_lengths(module, query, key, value, attention_mask, variant, segment_lengths), None


def _fits_a_graph(query: Tensor, value: Tensor, segments: Segments, variant: Variant) -> bool:
    """Whether attention is an operator that torch.compile knows; else it is left out of the graph."""
    is_plain = segments.ends is None and variant.window is None and variant.sinks is None
    return is_plain or takes_varlen(query, value, variant.dropout) or takes_segments(query, value, variant.dropout)


def _in_graph(query: Tensor, key: Tensor, value: Tensor, segments: Segments, variant: Variant) -> Tensor:
    ends, tokens = segments.ends, query.shape[2]
    if ends is None and variant.window is None and variant.sinks is None:
        return _of_one_length(query, key, value, segments.longest, variant)
    if ends is None:  # without a copy from the host
        ends = segments.longest * torch.arange(tokens // segments.longest + 1, dtype=torch.int32, device=query.device)
    return _in_one_call(query, key, value, Boundaries(ends, segments.longest), variant)


# Excluded from torch.compile, which would recompile it for every list of lengths.
@torch.compiler.disable
def _by_lengths(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    variant: Variant,
    segment_lengths: list[int] | None,
) -> Tensor:
    if attention_mask is None and (shared := current_lengths.shared()) is not None:
        return attend_with_shared_tokens(query, key, value, shared, variant)
    if not segment_lengths and isinstance(module, AttendsToAllRanks):
        segment_lengths = list(current_lengths.current())
    segment_lengths = segment_lengths or current_lengths.lengths_of(query.shape[2])
    if segment_lengths is None or attention_mask is not None:
        raise RecipeError(
            f"attn_implementation={PACKED} serves packed training batches only; for other use call "
            "model.set_attn_implementation('sdpa') first (if this came up in training: the architecture "
            "passes its attention a mask of its own, set model.attn_implementation to sdpa)"
        )
    if isinstance(module, AttendsInChunks):
        segment_lengths = in_chunks(segment_lengths, module.tokens_of_chunk)
    if isinstance(module, AttendsToAllRanks):
        return attend_to_all_ranks(query, key, value, module.context_mesh, segment_lengths, variant)
    longest = max(segment_lengths)
    is_plain = variant.sinks is None and (variant.window is None or longest <= variant.window)
    if is_plain and longest == min(segment_lengths):
        return _of_one_length(query, key, value, longest, variant)
    if takes_varlen(query, value, variant.dropout):
        return attend_to_segments(query, key, value, segment_lengths, variant)
    if variant.sinks is not None and takes_segments(query, value, variant.dropout):
        return attend_to_segments(query, key, value, segment_lengths, variant)
    parts = zip(*(tensor.split(segment_lengths, dim=2) for tensor in (query, key, value)), strict=True)
    return torch.cat([_segment(q, k, v, variant) for q, k, v in parts], dim=2).transpose(1, 2).contiguous()


def in_chunks(lengths: Sequence[int], size: int) -> list[int]:
    """Lengths of the chunks of at most ``size`` tokens that samples are divided into, each from its first token."""
    return [min(size, length - start) for length in lengths for start in range(0, length, size)]


def attend_to_all_ranks(
    query: Tensor, key: Tensor, value: Tensor, mesh: DeviceMesh, lengths: Sequence[int], variant: Variant
) -> Tensor:
    """Attention of this rank's tokens of a packed batch to the tokens of all ranks (context parallelism).

    Args:
        query: queries of this rank's tokens, in the order of ``local_ranges``; so are keys and values.
        mesh: mesh of the context-parallel ranks.
        lengths: lengths of the segments of the full packed batch.
        variant: what attention differs in from softmax over all tokens before.
    """
    tokens, ranks = sum(lengths), mesh.size()
    order = _order(tokens, ranks, query.device)
    keys, values = (_gather(tensor, mesh)[:, :, order] for tensor in (key, value))
    starts = [0, *accumulate(lengths)]
    pieces, taken = [], 0
    for own in local_ranges(tokens, ranks, mesh.get_local_rank()):
        for start, end in pairwise(starts):
            first, last = max(start, own.start), min(end, own.stop)
            if first < last:
                q = query[:, :, taken : taken + last - first]
                taken += last - first
                pieces.append((q, keys[:, :, start:last], values[:, :, start:last]))
    if takes_varlen(query, value, variant.dropout):
        joined_q, joined_k, joined_v = (torch.cat(parts, dim=2) for parts in zip(*pieces, strict=True))
        own_lengths, key_lengths = [q.shape[2] for q, _, _ in pieces], [k.shape[2] for _, k, _ in pieces]
        return attend_to_segments(joined_q, joined_k, joined_v, own_lengths, variant, key_lengths)
    outputs = [_segment(*piece, variant) for piece in pieces]
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous()


def attend_with_shared_tokens(
    query: Tensor, key: Tensor, value: Tensor, shared: SharedTokens, variant: Variant
) -> Tensor:
    """Attention of the tokens that are computed to those of their samples, ``(1, T', heads, head_dim)``.

    Args:
        query: queries of the T' tokens; so are keys and values.
        shared: the samples.
        variant: what attention differs in from softmax over all tokens before.
    """
    keys, values = (repeated(tensor, shared.places, 2) for tensor in (key, value))
    if takes_varlen(query, value, variant.dropout):
        return attend_to_segments(query, keys, values, shared.own_lengths, variant, shared.lengths)
    of_samples = query.split(shared.own_lengths, 2), keys.split(shared.lengths, 2), values.split(shared.lengths, 2)
    outputs = [_segment(*parts, variant) for parts in zip(*of_samples, strict=True)]
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous()


def _in_one_dtype(*tensors: Tensor) -> list[Tensor]:
    """Tensors in autocast's dtype, if it is on: rotary embeddings make queries and keys fp32, and values are not."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return list(tensors)
    return [tensor.to(torch.get_autocast_dtype(device)) for tensor in tensors]


def local_ranges(tokens: int, ranks: int, rank: int) -> list[range]:
    """Positions in a packed batch that a rank computes: a chunk from the front, and its mirror image from the end.

    The number of tokens is a multiple of twice the number of ranks.
    """
    size = tokens // (2 * ranks)
    return [range(size * piece, size * (piece + 1)) for piece in (rank, 2 * ranks - 1 - rank)]


def _places(tokens: int, ranks: int, rank: int) -> Tensor:
    return torch.cat([torch.arange(part.start, part.stop) for part in local_ranges(tokens, ranks, rank)])


@lru_cache(maxsize=4)  # once for all layers and both passes of a batch
@torch.inference_mode(False)  # a training step may have the lengths of an evaluation before it, and keeps the result
def _order(tokens: int, ranks: int, device: torch.device) -> Tensor:
    """Where each position of a packed batch is among the tokens of all ranks, one rank after another, ``(T,)``."""
    return queued_copy(torch.cat([_places(tokens, ranks, rank) for rank in range(ranks)]).argsort(), device)


def _gather(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Gather the tokens of all ranks; the backward pass sums the ranks' gradients for them."""
    whole = DTensor.from_local(tensor, mesh, [Shard(2)], run_check=False).redistribute(placements=[Replicate()])
    return whole.to_local(grad_placements=[Partial()])


def _of_one_length(q: Tensor, k: Tensor, v: Tensor, length: int, variant: Variant) -> Tensor:
    """Causal attention within segments of ``length`` tokens each, ``(1, T, heads, head_dim)``."""
    if q.shape[2] == length:
        return _segment(q, k, v, variant).transpose(1, 2).contiguous()
    q, k, v = (tensor[0].unflatten(1, (-1, length)).transpose(0, 1) for tensor in (q, k, v))
    return _segment(q, k, v, variant).transpose(1, 2).flatten(0, 1)[None].contiguous()


def _segment(q: Tensor, k: Tensor, v: Tensor, variant: Variant) -> Tensor:
    """Causal attention of a segment's last tokens to the full segment; several segments are a batch."""
    dropout, scaling, window, sinks = variant
    length, dtype = q.shape[2], q.dtype
    before = k.shape[2] - length
    is_slow = q.device.type == "cpu" and dtype == torch.bfloat16 and length < CPU_FP32_BELOW
    if is_slow and not torch.is_autocast_enabled("cpu"):  # which would cast them back
        q, k, v = q.float(), k.float(), v.float()
    width = v.shape[-1]
    if q.device.type == "cpu" and width < q.shape[-1]:  # the CPU's kernel takes values that are as wide as keys
        v = pad(v, (0, q.shape[-1] - width))
    groups = q.shape[1] // k.shape[1]
    if groups > 1 and q.device.type not in ("cpu", "cuda"):  # MPS groups heads from torch 2.13 on only
        k, v, groups = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1), 1
    mask = None
    if before or sinks is not None or (window is not None and length > window):
        back = torch.arange(length, device=q.device)[:, None] + before - torch.arange(k.shape[2], device=q.device)
        mask = back >= 0 if window is None else (back >= 0) & (back < window)
        if sinks is not None:  # a key more, whose logit is the sink and whose value is 0
            k, v = pad(k, (0, 0, 0, 1)), pad(v, (0, 0, 0, 1))
            added = q.new_zeros(mask.shape).masked_fill(~mask, -torch.inf).expand(len(sinks), -1, -1)
            mask = torch.cat([added, sinks.to(q.dtype)[:, None, None].expand(-1, length, 1)], dim=-1)[None]
    out = scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, scale=scaling, enable_gqa=groups > 1
    )
    return out[..., :width].to(dtype)


def attend_to_segments(
    q: Tensor, k: Tensor, v: Tensor, lengths: list[int], variant: Variant, key_lengths: list[int] | None = None
) -> Tensor:
    """Causal attention within each segment by one call, ``(1, T, heads, head_dim)``.

    Args:
        lengths: numbers of queries of the segments, each at its segment's end.
        variant: what attention differs in from softmax over all tokens before; without dropout.
        key_lengths: lengths of the segments, where it is not those of the queries.
    """
    within = Boundaries(_ends(tuple(lengths), q.device), max(lengths))
    if key_lengths is not None:
        within = within._replace(key_ends=_ends(tuple(key_lengths), q.device), longest_keys=max(key_lengths))
    return _in_one_call(q, k, v, within, variant)


def _in_one_call(q: Tensor, k: Tensor, v: Tensor, within: Boundaries, variant: Variant) -> Tensor:
    if q.device.type != "cpu" and not varlen.GROUPS_HEADS:
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    width = v.shape[-1]
    v = pad(v, (0, q.shape[-1] - width))  # kernels take values that are as wide as keys
    if variant.sinks is not None:
        out = attend_with_sinks(q, k, v, variant.sinks, within, variant.scaling, variant.window)
    elif q.device.type == "cpu":
        out = attend(q, k, v, within.ends, variant.scaling, variant.window)
    else:
        out, _ = varlen.forward(q, k, v, within, variant.scaling, variant.window)
    return out[..., :width].transpose(1, 2).contiguous()


@lru_cache(maxsize=4)  # once for all layers and both passes of a batch
@torch.inference_mode(False)  # a training step may have the lengths of an evaluation before it, and keeps the result
def _ends(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Cumulative lengths of segments, 0 first, ``(segments + 1,)``, int32."""
    return queued_copy(torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32), device)


AttentionInterface.register(PACKED, packed_attention)
