"""Weights of a model in GGUF's names, layouts and types, one tensor at a time."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from lit_callbacks.export.weight_files import opened, weight_files
from torch import Tensor
from transformers import PretrainedConfig

from lit_ft.errors import RecipeError
from lit_ft.gguf import WeightType
from lit_ft.gguf.architectures import Family, rope_divisors

TYPES: dict[WeightType, GGMLQuantizationType] = {
    "f32": GGMLQuantizationType.F32,
    "f16": GGMLQuantizationType.F16,
    "bf16": GGMLQuantizationType.BF16,
    "q8_0": GGMLQuantizationType.Q8_0,
}
FILE_TYPES: dict[WeightType, gguf.LlamaFileType] = {
    "f32": gguf.LlamaFileType.ALL_F32,
    "f16": gguf.LlamaFileType.MOSTLY_F16,
    "bf16": gguf.LlamaFileType.MOSTLY_BF16,
    "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
}
"""Type that the file as a whole declares; norms and biases are F32 in each."""


@dataclass(frozen=True)
class Weight:
    """One tensor of a GGUF file."""

    name: str
    type: GGMLQuantizationType
    values: Tensor
    """In the layout of the file; memory-mapped where it is that of the source."""

    @property
    def n_bytes(self) -> int:
        """Bytes in the file."""
        shape = gguf.quant_shape_to_byte_shape(tuple(self.values.shape), self.type)
        return int(np.prod(shape, dtype=np.int64))

    def quantized(self) -> np.ndarray:
        """Values in the type of the file."""
        return gguf.quantize(self.values.to(torch.float32).contiguous().numpy(), self.type)


@dataclass(frozen=True)
class ModelWeights:
    """Weights of a Hugging Face folder, converted as they are read."""

    folder: Path
    config: PretrainedConfig
    family: Family
    type: WeightType

    def __iter__(self) -> Iterator[Weight]:
        """All weights, in the order of the files; each pass reads them anew.

        Raises:
            RecipeError: a tensor has no name in GGUF.
        """
        if (divisors := rope_divisors(self.config)) is not None:
            yield Weight("rope_freqs.weight", GGMLQuantizationType.F32, divisors)
        name_in_gguf = names_of(self.family, self.config)
        for file in weight_files(self.folder):
            with opened(file) as weights:
                for name in weights.names:
                    values = in_layout(name, weights.tensor(name), self.config, self.family)
                    new_name = name_in_gguf(name)
                    yield Weight(new_name, type_of(new_name, values, self.type), values)


def names_of(family: Family, config: PretrainedConfig) -> Callable[[str], str]:
    """Function from the name of a Hugging Face tensor to that in GGUF, which raises ``RecipeError`` for others."""
    names = gguf.get_tensor_name_map(family.arch, config.num_hidden_layers)

    def name_in_gguf(name: str) -> str:
        gguf_name = names.get_name(name, (".weight", ".bias"))
        if gguf_name is None:
            raise RecipeError(f"the tensor {name} has no name in GGUF's {family.arch.name}; leave out --gguf")
        return gguf_name

    return name_in_gguf


def in_layout(name: str, values: Tensor, config: PretrainedConfig, family: Family) -> Tensor:
    """Values of a Hugging Face tensor in the layout of GGUF.

    Args:
        name: name in Hugging Face's files.
        values: the tensor; of the factors of LoRA, B, whose rows are the weight's.
        config: config of the model.
        family: family of the model.
    """
    projection = name.split(".")[-2]
    if not family.pairs_neighbors or projection not in ("q_proj", "k_proj"):
        return values
    heads = config.num_attention_heads if projection == "q_proj" else config.num_key_value_heads
    # (heads, 2 halves, pairs, ...) -> (heads, pairs, 2, ...): element i of each half is next to its partner.
    return values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def type_of(name: str, values: Tensor, weight_type: WeightType) -> GGMLQuantizationType:
    """Type of a tensor in a file: F32 for norms and biases; F16 where a row is no multiple of the block of a type."""
    if values.dim() == 1 or name.endswith("_norm.weight"):
        return GGMLQuantizationType.F32
    block, _ = gguf.GGML_QUANT_SIZES[TYPES[weight_type]]
    return TYPES[weight_type] if values.shape[-1] % block == 0 else GGMLQuantizationType.F16
