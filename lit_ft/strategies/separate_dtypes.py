"""Weights of several dtypes in one layer: torch's ``fully_shard`` takes trained weights of one dtype at a time.

Some models keep some weights in float32, e.g. those of routers beside layers in bfloat16.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from lit_ft.errors import RecipeError
from lit_ft.model.compiled_layers import is_compiled
from lit_ft.model.isolation import token_mixers
from lit_ft.training.float32.products import kept_modules


class Shard(Protocol):
    """Function that shards the weights of a module that no part of it has sharded."""

    def __call__(self, module: nn.Module, /, *, mp_policy: MixedPrecisionPolicy = ...) -> object:
        """Shard them; ``mp_policy`` says in which dtype they are gathered."""


def shard_kept(layer: nn.Module, shard: Shard) -> None:
    """Shard the parts of a layer that compute in float32 under autocast, so that their weights are gathered in it.

    All other weights are gathered in half precision, these too where the part is in a module that mixes tokens, which
    ranks may call sample by sample, or in a compiled layer, whose graph FSDP's hooks would break.

    Args:
        layer: layer, or model whose layers are sharded.
        shard: function that shards the weights of a module.
    """
    if is_compiled(layer):
        return
    whole = [*token_mixers.mixers(layer, in_layer=True), *(m for m in layer.modules() if isinstance(m, FSDPModule))]
    in_whole = {part for module in whole for part in module.modules()}
    for part in kept_modules(layer):
        if part not in in_whole:
            shard(part, mp_policy=MixedPrecisionPolicy())


def shard_by_dtype(module: nn.Module, shard: Shard) -> None:
    """Shard a module, and before it those of its parts whose trained weights have another dtype than most.

    Args:
        module: module; parts of it that are sharded are left as they are.
        shard: function that shards the weights of a module.

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


def _separate(module: nn.Module, dtype: torch.dtype, shard: Shard) -> None:
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
