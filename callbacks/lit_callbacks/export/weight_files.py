"""Weight files of a model folder: their tensors without reading them, and their index."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

INDEX = "model.safetensors.index.json"
"""File name of the index of several weight files."""


class Opened(NamedTuple):
    """Weight file that is open; its tensors are memory-mapped."""

    names: list[str]
    """Names of its tensors."""
    tensor: Callable[[str], Tensor]
    """Function from the name of a tensor to the tensor, on the CPU."""


@contextmanager
def opened(file: Path) -> Iterator[Opened]:
    """Context in which a weight file is open, of safetensors or of torch (``.bin``)."""
    if file.suffix == ".bin":
        weights = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
        yield Opened(list(weights), weights.__getitem__)
        return
    from safetensors import safe_open

    with safe_open(file, framework="pt") as tensors:
        yield Opened(list(tensors.keys()), tensors.get_tensor)


def weight_files(folder: Path) -> list[Path]:
    """Weight files of a model folder: safetensors or, only if there are none, torch's."""
    for single, several in (("model.safetensors", INDEX), ("pytorch_model.bin", "pytorch_model.bin.index.json")):
        if (folder / single).is_file():
            return [folder / single]
        if (folder / several).is_file():
            names = json.loads((folder / several).read_text(encoding="utf-8"))["weight_map"].values()
            return [folder / name for name in sorted(set(names))]
    return []


def number(folder: Path) -> None:
    """Give the safetensors files of a folder the names that transformers expects, and write their index.

    A single file needs none.

    Args:
        folder: folder with nothing but weights of one model as safetensors files; they keep the order of their names.
    """
    (folder / INDEX).unlink(missing_ok=True)
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        files[0].rename(folder / "model.safetensors")
        return
    weight_map, size = {}, 0
    for position, file in enumerate(files, start=1):
        name = f"model-{position:05}-of-{len(files):05}.safetensors"
        with opened(file) as weights:
            weight_map.update(dict.fromkeys(weights.names, name))
        size += _bytes_of_tensors(file)
        file.rename(folder / name)
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _bytes_of_tensors(file: Path) -> int:
    with file.open("rb") as opened_file:
        header = int.from_bytes(opened_file.read(8), "little")
    return file.stat().st_size - 8 - header
