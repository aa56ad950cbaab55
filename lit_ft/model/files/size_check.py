"""Comparison of the shapes in weight files with config.json, before any memory is allocated.

Messages begin with ``where``, the name of the folder in the recipe.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from lit_callbacks.export.weight_files import weight_files as in_folder
from lit_callbacks.internals.transformers_internals import names_in_model
from lit_callbacks.output.quantities import as_count
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel

from lit_ft.errors import RecipeError, explained
from lit_ft.model.files.git_pointer import refuse_pointer

LARGEST = {
    "num_hidden_layers": 10_000,
    "num_attention_heads": 100_000,
    "num_key_value_heads": 100_000,
    "head_dim": 1_000_000,
    "hidden_size": 1_000_000,
    "intermediate_size": 10_000_000,
    "vocab_size": 100_000_000,
    "max_position_embeddings": 2**40,
    "num_local_experts": 100_000,
    "num_experts": 100_000,
}
"""Upper bounds for sizes in config.json, far above those of any model: with larger ones, building would never end."""


def check_sizes(path: Path, where: str) -> None:
    """Refuse a config with sizes that no model has, because some classes create lists of that length.

    Raises:
        RecipeError: a size is out of bounds, or the file is not a JSON object.
    """
    with explained(f"{where}: config.json", "put back the file"):
        config = dict(json.loads(path.read_text(encoding="utf-8")))
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        for name, largest in LARGEST.items():
            value = part.get(name)
            if isinstance(value, int) and not 1 <= value <= largest:
                raise RecipeError(f"{where}: config.json: {name}={value} must be 1 to {largest:,}; put back the file")


def check_weights(folder: Path, skeleton: PreTrainedModel, where: str) -> None:
    """Compare the weight files of a folder with the model that its config describes.

    The model is on the meta device. Weights that transformers splits or joins while it reads them are not compared.

    Raises:
        RecipeError: a file is damaged or missing, or a weight has another shape.
    """
    own = {name: tuple(value.shape) for name, value in skeleton.state_dict().items()}
    for file in weight_files(folder, where):
        shapes = dict(shapes_of(file, where))
        for name, renamed in names_in_model(skeleton, shapes, only_renamed=True).items():
            if (shape := shapes[name]) != (expected := own.get(renamed, shape)):
                raise RecipeError(
                    f"{where}: {name} is {shape} in {file.name}, and {expected} by config.json; put back the file "
                    "that was changed, or take the size out of model.config_overrides"
                )


def check_memory(skeleton: nn.Module, dtype: torch.dtype, where: str) -> None:
    """Refuse random weights that do not fit in this machine's memory.

    Raises:
        RecipeError: there is too little memory; the message gives both sizes in GiB.
    """
    if torch.get_default_device().type != "cpu":
        return
    needed = sum(parameter.numel() for parameter in skeleton.parameters()) * dtype.itemsize
    if needed > (there := os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")):
        raise RecipeError(
            f"{where}: the weights by config.json are {needed / 2**30:,.1f} GiB, and this machine has "
            f"{there / 2**30:,.1f} GiB of memory; correct the sizes in config.json, or take a smaller model"
        )


def weight_files(folder: Path, where: str) -> list[Path]:
    """Safetensors files with a folder's weights; empty if the weights are in another format.

    Raises:
        RecipeError: the index is damaged, or names a file that does not exist.
    """
    return [file for file in read_files(folder, where) if file.suffix == ".safetensors"]


def read_files(folder: Path, where: str) -> list[Path]:
    """Files that transformers reads a folder's weights from, of either format.

    Raises:
        RecipeError: as ``weight_files``.
    """
    with explained(f"{where}: its index of weights", "put back the file"):
        files = in_folder(folder)
    if missing := [file.name for file in files if not file.is_file()]:
        raise RecipeError(
            f"{where}: its index of weights names {as_count(len(missing), 'missing file')} ({', '.join(missing[:3])}); "
            "download the model again"
        )
    return files


def shapes_of(file: Path, where: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the weights in a file; the weights are not read.

    Raises:
        RecipeError: the file is damaged, or Git's pointer to it.
    """
    refuse_pointer(file, f"{where}: {file.name}")
    with (
        explained(f"{where}: {file.name}", "download it again", also=(SafetensorError,)),
        safe_open(file, framework="pt") as opened,
    ):
        shapes = [(name, tuple(opened.get_slice(name).get_shape())) for name in opened.keys()]  # noqa: SIM118
    yield from shapes
