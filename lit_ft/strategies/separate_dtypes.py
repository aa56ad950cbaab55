"""Trained weights of several dtypes in one layer: torch's ``fully_shard`` takes weights of one dtype at a time.

Some models keep some weights in float32, e.g. those of routers beside layers in bfloat16.
"""

from collections import Counter
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lit_ft.errors import RecipeError


def shard_by_dtype(module: nn.Module, shard: Callable[[nn.Module], object]) -> None:
    """Shard a module, and before it those of its parts whose trained weights have another dtype than most.

    Args:
        module: module; parts of it that are sharded are left as they are.
        shard: function that shards the weights of a module that no part of it has sharded.

    Raises:
        RecipeError: one part itself has trained weights of several dtypes.
    """
    counts = Counter[torch.dtype]()
    for part in _unsharded(module):
        for weight in _trained(part):
            counts[weight.dtype] += weight.numel()
    if len(counts) > 1:
        _separate(module, counts.most_common(1)[0][0], shard)
    shard(module)


def _separate(module: nn.Module, dtype: torch.dtype, shard: Callable[[nn.Module], object]) -> None:
    for name, part in module.named_children():
        if isinstance(part, FSDPModule):
            continue
        own = {weight.dtype for weight in _trained(part)} or {dtype}
        if len(own) > 1:
            raise RecipeError(
                f"{name} ({type(part).__name__}) trains weights of {', '.join(sorted(map(str, own)))}, which cannot be "
                "sharded together; train all in one dtype: trainer.precision=bf16-true, or model.dtype=float32"
            )
        (of_part,) = own
        _separate(part, of_part, shard)
        if of_part != dtype:
            shard(part)


def _unsharded(module: nn.Module) -> Iterator[nn.Module]:
    yield module
    for part in module.children():
        if not isinstance(part, FSDPModule):
            yield from _unsharded(part)


def _trained(module: nn.Module) -> Iterator[nn.Parameter]:
    return (weight for weight in module.parameters(recurse=False) if weight.requires_grad)
