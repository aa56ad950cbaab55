"""Weights of a model in GGUF's names, layouts and types, one tensor at a time."""

import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from lit_callbacks.export.weight_files import opened, weight_files
from torch import Tensor
from transformers import PretrainedConfig

from lit_ft.gguf import WeightType
from lit_ft.gguf.architectures import Family
from lit_ft.gguf.hyperparameters import rope_divisors
from lit_ft.gguf.layouts import names_of, order_of, value_of

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

_IN_FLOAT32 = ("_norm.weight", "ffn_gate_inp", "ssm_conv1d")
"""Parts of the names of tensors that llama.cpp has in F32: norms, routers and convolutions."""
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(.+)")


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
        for name, source in self._tensors():
            values, order = value_of(name, source, self.family), order_of(name, self.config, self.family)
            if order is not None:
                values = order.applied(values)
            new_name = name_in_gguf(name)
            yield Weight(new_name, type_of(new_name, values, self.type), values)

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Tensors of the files, by name; those of a layer's experts are one, ``(experts, ...)``."""
        with ExitStack() as stack:
            files = [stack.enter_context(opened(file)) for file in weight_files(self.folder)]
            read = {name: file.tensor for file in files for name in file.names}
            for name, sources in _with_experts_together(read).items():
                values = [read[source](source) for source in sources]
                yield name, torch.stack(values) if _EXPERT.fullmatch(sources[0]) else values[0]


def _with_experts_together(names: Iterable[str]) -> dict[str, list[str]]:
    """Names of the tensors that each tensor in GGUF is made of, by its name without the number of an expert."""
    together: dict[str, list[str]] = {}
    for name in names:
        together.setdefault(_EXPERT.sub(r"\1.\3", name), []).append(name)

    def number(name: str) -> int:
        expert = _EXPERT.fullmatch(name)
        return int(expert[2]) if expert else 0

    return {name: sorted(sources, key=number) for name, sources in together.items()}


def type_of(name: str, values: Tensor, weight_type: WeightType) -> GGMLQuantizationType:
    """Type of a tensor in a file: F32 for what is small; F16 where a row is no multiple of the block of a type."""
    if values.dim() == 1 or any(kind in name for kind in _IN_FLOAT32):
        return GGMLQuantizationType.F32
    block, _ = gguf.GGML_QUANT_SIZES[TYPES[weight_type]]
    return TYPES[weight_type] if values.shape[-1] % block == 0 else GGMLQuantizationType.F16
