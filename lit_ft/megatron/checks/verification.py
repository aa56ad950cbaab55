"""Verification of a conversion: the inverse of it must give back every bit of its source."""

import torch
from torch import Tensor

from lit_ft.errors import RecipeError
from lit_ft.megatron.formats.hugging_face import Weights
from lit_ft.megatron.formats.source import MegatronSource
from lit_ft.megatron.mapping import AsHuggingFace, AsMegatron
from lit_ft.megatron.progress import progress
from lit_ft.megatron.shape import ModelShape


class NotTheSame(RecipeError):
    """A tensor of the result is not that of the source: the disk or the conversion is at fault."""


def check_back(weights: Weights, written: AsHuggingFace) -> None:
    """Convert a written Megatron checkpoint back, and compare each tensor with those of Hugging Face.

    Raises:
        NotTheSame: a tensor differs in a bit or in its dtype.
    """
    tensors = written.tensors()
    with progress("comparing", sum(tensor.bytes for tensor in tensors)) as advance:
        for tensor in tensors:
            _compare(tensor.name, weights.read(tensor.name), written.read(tensor.name))
            advance(tensor.bytes)


def check_forth(source: MegatronSource, written: AsMegatron, shape: ModelShape) -> None:
    """Convert a written Hugging Face folder back, and compare each weight with the Megatron checkpoint.

    Rows that pad the vocabulary are not compared: a Hugging Face folder has none.

    Args:
        source: checkpoint.
        written: folder that was written.
        shape: sizes of the model.

    Raises:
        NotTheSame: a weight differs in a bit or in its dtype.
    """
    with progress("comparing", written.bytes) as advance:
        for key in shape.all_keys():
            parts = source.parts(key)
            first = 0
            for rank, part in enumerate(parts):
                if key.weight.is_padded:
                    rows = written.rows(key, first, first := first + len(part))
                    _compare(key.megatron, part[: len(rows)], rows)
                else:
                    _compare(key.megatron, part, written.part(key, rank, len(parts)))
            advance(sum(part.nbytes for part in parts))


def _compare(name: str, expected: Tensor, got: Tensor) -> None:
    bits = torch.uint8  # NaN is not equal to itself
    if expected.dtype != got.dtype or not torch.equal(expected.contiguous().view(bits), got.contiguous().view(bits)):
        raise NotTheSame(f"{name} is not the same after conversion there and back: nothing is written; check the disk")
