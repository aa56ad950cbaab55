"""Hugging Face model folders, read and written a tensor at a time."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from safetensors import safe_open
from torch import Tensor
from transformers.utils import SAFE_WEIGHTS_NAME

from lit_ft.errors import RecipeError
from lit_ft.model.files.size_check import shapes_of, weight_files

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}
"""Names of dtypes in safetensors files."""
MOST_BYTES = 5 * 10**9
"""Largest size of one file of weights."""


class TensorInfo(NamedTuple):
    """Name, shape and dtype of a tensor to write."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Weights(Protocol):
    """Tensors by Hugging Face's names, read a part of a tensor at a time."""

    folder: Path
    """Where they come from."""
    shapes: dict[str, tuple[int, ...]]
    """Shape of each tensor."""

    def read(self, name: str, dimension: int | None = None, first: int = 0, last: int = 0) -> Tensor:
        """Copy of a tensor, or of its rows or columns ``first`` to ``last`` (exclusive)."""

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a tensor."""


class HuggingFaceWeights:
    """Weights of a model folder, read a part of a tensor at a time."""

    def __init__(self, folder: Path) -> None:
        """Read the headers of the weight files.

        Raises:
            RecipeError: the folder holds no safetensors files, or one of them is damaged.
        """
        self.folder = folder
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._files: dict[str, Path] = {}
        for file in weight_files(folder, str(folder)):
            for name, shape in shapes_of(file, str(folder)):
                self.shapes[name], self._files[name] = shape, file
        if not self._files:
            raise RecipeError(f"{str(folder)!r} holds no safetensors weights; name a folder of a Hugging Face model")

    def read(self, name: str, dimension: int | None = None, first: int = 0, last: int = 0) -> Tensor:
        """Copy of a tensor, or of its rows or columns ``first`` to ``last`` (exclusive)."""
        # Opened for each tensor: pages of a mapped file count as this process's memory as long as it is open.
        with safe_open(self._files[name], framework="pt") as opened:
            tensor = opened.get_slice(name)
            if dimension is None:
                return tensor[...].clone()
            return (tensor[first:last] if dimension == 0 else tensor[:, first:last]).clone()

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a tensor."""
        with safe_open(self._files[name], framework="pt") as opened:
            spelling = opened.get_slice(name).get_dtype()
        return next((dtype for dtype, name in _DTYPES.items() if name == spelling), torch.uint8)


class PlannedFile(NamedTuple):
    """A file of weights to write."""

    name: str
    tensors: list[TensorInfo]


def plan_files(tensors: Iterable[TensorInfo]) -> list[PlannedFile]:
    """Distribute tensors, in order, among files of at most ``MOST_BYTES``."""
    groups: list[list[TensorInfo]] = [[]]
    size = 0
    for tensor in tensors:
        if groups[-1] and size + tensor.bytes > MOST_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.bytes
    if len(groups) == 1:
        return [PlannedFile(SAFE_WEIGHTS_NAME, groups[0])]
    count = len(groups)
    return [PlannedFile(f"model-{n:05}-of-{count:05}.safetensors", group) for n, group in enumerate(groups, start=1)]


def write_file(path: Path, tensors: list[TensorInfo], read: Callable[[str], Tensor]) -> None:
    """Write a safetensors file; safetensors' own ``save_file`` takes all tensors at once.

    The format: 8 bytes with the header's length, the header in JSON, then the tensors' bytes.

    Args:
        path: path of the file.
        tensors: tensors to write, in order.
        read: gives a tensor by its name.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for info in tensors:
        start, end = end, end + info.bytes
        header[info.name] = {
            "dtype": _DTYPES[info.dtype],
            "shape": list(info.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for info in tensors:
            tensor = read(info.name).contiguous()
            assert (tuple(tensor.shape), tensor.dtype) == (info.shape, info.dtype), info.name
            file.write(tensor.view(torch.uint8).numpy().data)


def index_text(files: list[PlannedFile]) -> str:
    """Text of the index of several files."""
    weight_map = {tensor.name: file.name for file in files for tensor in file.tensors}
    size = sum(tensor.bytes for file in files for tensor in file.tensors)
    return json.dumps({"metadata": {"total_size": size}, "weight_map": weight_map}, indent=2) + "\n"
