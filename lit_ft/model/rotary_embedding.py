"""Rotary embeddings with length-dependent frequencies, computed for each sample of a packed batch separately.

transformers computes the frequencies of ``longrope`` (Phi-3, Phi-4) and ``dynamic`` for the largest position that it
is given, and keeps those of ``dynamic`` for later calls. In a packed batch of several samples, one long sample would
change the frequencies of all others, and those of later packed batches.
"""

import copy
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from lit_ft.model.isolation import lengths


def rope_types(module: nn.Module) -> dict[str, str]:
    """Kinds of frequencies of a rotary embedding, by the prefix of its attributes; empty for any other module."""
    kinds: object = getattr(module, "rope_type", None)
    if isinstance(kinds, str):
        return {"": kinds}
    return {f"{layer_type}_": kind for layer_type, kind in kinds.items()} if isinstance(kinds, dict) else {}


def depends_on_length(module: nn.Module) -> bool:
    """Whether the frequencies of a rotary embedding depend on the largest position that it is given."""
    kinds = set(rope_types(module).values())
    if type(module).__name__ == "PhimoeRotaryEmbedding":  # scales by length with every kind but the default
        return bool(kinds - {"default"})
    return any(kind == "longrope" or "dynamic" in kind for kind in kinds)


def rotated_width(model: nn.Module) -> int:
    """Number of a head's dimensions that a model's first rotary embedding has a cosine for; 0 without one.

    Where it rotates pairs of dimensions as complex numbers, there is one for each pair.
    """
    for module in model.modules():
        if kinds := rope_types(module):
            x, positions = torch.zeros(2, 1, 1, dtype=torch.long, device="cpu")
            of_layers = () if "" in kinds else (next(iter(kinds)).removesuffix("_"),)
            copied = copy.deepcopy(module).to_empty(device="cpu")  # dynamic frequencies read positions: not on meta
            width: int = copied(x, positions, *of_layers)[0].shape[-1]
            return width
    return 0


def keep_samples_apart(model: nn.Module) -> None:
    """Make a model's rotary embeddings compute each sample of a packed batch with the frequencies that it has alone."""
    for module in model.modules():
        if depends_on_length(module):
            module.forward = partial(_sample_by_sample, module, module.forward)


def _sample_by_sample(
    module: nn.Module, forward: Callable[..., Any], x: Tensor, position_ids: Tensor, *args: object, **kwargs: object
) -> Tensor | tuple[Tensor, ...]:
    """Result of ``module`` for positions ``(..., T)``, computed for each sample separately."""
    results = []
    for positions in position_ids.split(_sample_lengths(position_ids), dim=-1):
        _forget_length(module)
        results.append(forward(x, positions, *args, **kwargs))
    if len(results) == 1:
        return results[0]
    if isinstance(results[0], Tensor):
        return torch.cat(results, dim=-2)
    return tuple(torch.cat(parts, dim=-2) for parts in zip(*results, strict=True))


def _sample_lengths(position_ids: Tensor) -> list[int]:
    tokens = position_ids.shape[-1]
    if sum(known := lengths.current()) == tokens:
        return list(known)
    if position_ids.ndim > 2 or len(position_ids) > 1:
        return [tokens]  # a padded batch of `generate`: transformers uses the same frequencies for all of it
    restarts = (position_ids[0].diff() != 1).nonzero()[:, 0] + 1
    borders = [0, *restarts.tolist(), tokens]
    return [end - start for start, end in pairwise(borders)]


def _forget_length(module: nn.Module) -> None:
    """Reset ``dynamic`` frequencies to their initial values."""
    for prefix, kind in rope_types(module).items():
        if "dynamic" in kind:
            setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)
            setattr(module, f"{prefix}inv_freq", getattr(module, f"{prefix}original_inv_freq"))
