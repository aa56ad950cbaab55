"""Fusion of Hugging Face tensors into one Megatron weight, and its inverse.

Tensor parallelism divides heads and rows before they are joined, so both functions work on one rank's part as well as
on the whole: ``join`` of the rank's parts is the rank's part of the joined weight.
"""

import torch
from torch import Tensor

from lit_ft.megatron.families import Join


def join(tensors: list[Tensor], how: Join, head_dim: int) -> Tensor:
    """Megatron's weight from its Hugging Face tensors.

    Args:
        tensors: parts, in the order of the table; all of them, or one tensor-parallel rank's rows or columns.
        how: how they form one weight.
        head_dim: size of one attention head.
    """
    if how == "query key value":
        # Per key-value head: its query heads, the key, the value.
        groups = tensors[1].shape[0] // head_dim
        grouped = [tensor.reshape(groups, -1, *tensor.shape[1:]) for tensor in tensors]
        return torch.cat(grouped, dim=1).flatten(0, 1)
    return torch.cat(tensors) if how == "stacked" else tensors[0]


def separate(weight: Tensor, how: Join, head_dim: int, queries_per_key: int) -> list[Tensor]:
    """Hugging Face tensors of Megatron's weight: the inverse of ``join``.

    Args:
        weight: weight, or one tensor-parallel rank's part of it.
        how: how it was formed.
        head_dim: size of one attention head.
        queries_per_key: number of query heads per key-value head.
    """
    if how == "query key value":
        rows = (queries_per_key * head_dim, head_dim, head_dim)
        grouped = weight.reshape(-1, sum(rows), *weight.shape[1:])
        return [tensor.flatten(0, 1) for tensor in grouped.split(rows, dim=1)]
    return list(weight.chunk(2)) if how == "stacked" else [weight]
