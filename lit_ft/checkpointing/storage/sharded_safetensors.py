"""Sharded writing of a Hugging Face model folder, to which each rank adds one part of the weights."""

import copy
from itertools import chain
from pathlib import Path

import torch
from lit_callbacks.distributed.gather import full_tensor, persistent_buffers
from lit_callbacks.export.merge_check import MergeFailed
from lit_callbacks.export.weight_files import number
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from lit_ft.errors import RecipeError
from lit_ft.internals.transformers import as_published
from lit_ft.model.files.finite_weights import not_finite


def collect(base: nn.Module, writers: int, rank: int, left_out: frozenset[str] = frozenset()) -> dict[str, Tensor]:
    """Gather full weights and persistent buffers one at a time, and keep those of this rank's layers.

    A collective of the ranks that the weights are sharded over.

    Args:
        base: Hugging Face model, or this rank's part of it.
        writers: number of ranks that the same weights are sharded over; each keeps some of the layers.
        rank: index of this rank among them.
        left_out: names of parameters that are saved under another name.
    """
    kept = {}
    for name, weight in chain(base.named_parameters(), persistent_buffers(base)):
        if name not in left_out:
            full = full_tensor(weight)
            if _layer_of(name) % writers == rank:
                kept[name] = full.to("cpu", copy=True)
    return kept


def _layer_of(name: str) -> int:
    """Number of the layer that a weight belongs to; weights that are converted together are in one layer."""
    return next((int(part) for part in name.split(".") if part.isdigit()), 0)


def write_part(base: PreTrainedModel, weights: dict[str, Tensor], file: Path) -> None:
    """Write some of a model's weights, under the names of its published files.

    transformers' ``save_pretrained`` writes on rank 0 only.

    Raises:
        RecipeError: a weight is not finite.
    """
    if (bad := next(not_finite(weights), None)) is not None:
        raise RecipeError(f"{bad} has values that are not finite; nothing is written, resume an earlier checkpoint")
    contiguous = {name: weight.contiguous() for name, weight in as_published(base, _skeleton(base), weights).items()}
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(contiguous, file, metadata={"format": "pt"})


def check_complete(base: PreTrainedModel, names: set[str]) -> None:
    """Check that all parameters and persistent buffers of the full model are written, under ``names``.

    Raises:
        MergeFailed: a tensor is missing.
    """
    full = _skeleton(base)
    expected = (name for name, _ in chain(full.named_parameters(), persistent_buffers(full)))
    if missing := [name for name in expected if name not in names]:
        raise MergeFailed(f"no rank writes {', '.join(missing[:3])} ({len(missing)} in all); nothing was written")


def _skeleton(base: PreTrainedModel) -> PreTrainedModel:
    """Full model on the meta device."""
    with torch.device("meta"):
        return type(base)(copy.deepcopy(base.config))


def join_parts(base: PreTrainedModel, folder: Path) -> None:
    """Rename the files of all ranks, and write index and configs; called on one rank."""
    number(folder)
    config = copy.deepcopy(base.config)
    config.architectures, config.dtype = [type(base).__name__], base.dtype
    config.save_pretrained(folder)
    if base.can_generate() and base.generation_config is not None:
        base.generation_config.save_pretrained(folder)
