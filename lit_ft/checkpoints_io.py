"""What a checkpoint holds: the weights that train, and nothing that can be had elsewhere."""

import shutil
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import torch
from lightning.pytorch.plugins import TorchCheckpointIO
from lit_callbacks.gather import whole_numel
from torch import Tensor, nn

from lit_ft import split_checkpoints
from lit_ft.errors import RecipeError

Shapes = dict[str, tuple[int, ...]]


class AnyCheckpointIO(TorchCheckpointIO):
    """Lightning's own, which also reads the folders that sharding strategies write, under any other strategy."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write one file; a folder of that name, of an earlier part of the run, goes once it is written."""
        folder, aside = Path(path), Path(path).with_name(f".{Path(path).name}.old")
        if folder.is_dir():
            folder.rename(aside)
        super().save_checkpoint(checkpoint, path, storage_options)
        shutil.rmtree(aside, ignore_errors=True)

    def load_checkpoint(self, path: Any, *args: Any, **options: Any) -> dict[str, Any]:
        """A checkpoint with whole tensors."""
        if split_checkpoints.is_folder_of_shares(Path(path)):
            return split_checkpoints.read_whole(Path(path))
        return super().load_checkpoint(path, *args, **options)


class WeightCount(NamedTuple):
    """How much of a model there is, and how much of it trains."""

    trained: int
    total: int
    trained_bytes: int

    @classmethod
    def of(cls, model: nn.Module) -> "WeightCount":
        """Count a model that no rank has let go of parts of; where ZeRO-3 has split weights, they count whole."""
        trains = [p for p in model.parameters() if p.requires_grad]
        return cls(
            sum(map(whole_numel, trains)),
            sum(map(whole_numel, model.parameters())),
            sum(whole_numel(p) * p.element_size() for p in trains),
        )


def trainable_shapes(module: nn.Module) -> Shapes:
    """Names and shapes of the weights that train, tied aliases included; whole shapes where ZeRO-3 has split them."""
    trains = {n: p for n, p in module.named_parameters(remove_duplicate=False) if p.requires_grad}
    return {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in trains.items()}


def shapes_of(state_dict: dict[str, Tensor]) -> Shapes:
    """Names and shapes of saved weights."""
    return {name: tuple(tensor.shape) for name, tensor in state_dict.items()}


def saved_shapes(ckpt_path: str) -> Shapes:
    """Names and shapes of a checkpoint file's weights; the weights themselves are not read.

    Raises:
        RecipeError: the file is no Lightning checkpoint.
    """
    if split_checkpoints.is_folder_of_shares(Path(ckpt_path)):
        return split_checkpoints.shapes(Path(ckpt_path))
    return shapes_of(_read(ckpt_path)["state_dict"])


def saved_start(ckpt_path: str) -> Any:
    """What the adapter's init found (``adapter_start.Start``); None where there was nothing to find.

    Raises:
        RecipeError: the file is no Lightning checkpoint.
    """
    return _read(ckpt_path).get("adapter_start")


def saved_base(ckpt_path: str) -> Any:
    """The fingerprint of the base that a checkpoint's weights were trained on; None where none was written.

    Raises:
        RecipeError: the file is no Lightning checkpoint.
    """
    return _read(ckpt_path).get("base")


def _read(ckpt_path: str) -> dict[str, Any]:
    try:
        file = Path(ckpt_path)
        if split_checkpoints.is_folder_of_shares(file):
            file = file / split_checkpoints.META
        checkpoint = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
        checkpoint["state_dict"]
        return checkpoint
    except (OSError, RuntimeError, KeyError, ValueError, TypeError, UnpicklingError) as error:
        raise RecipeError(
            f"ckpt_path={ckpt_path!r} is no Lightning checkpoint ({type(error).__name__}); name a .ckpt file of a run"
        ) from error


def check_fit(saved: Shapes, wanted: Shapes) -> None:
    """Compare a checkpoint's weights with those that train.

    Raises:
        RecipeError: names or shapes differ.
    """
    if saved == wanted:
        return
    differing = sorted(set(saved.items()) ^ set(wanted.items()))
    name, shape = differing[0]
    where = "the checkpoint" if saved.get(name) == shape else "the model"
    raise RecipeError(
        f"the checkpoint does not fit the model: {len({n for n, _ in differing})} of {len(wanted)} trainable weights "
        f"differ, e.g. {name} {shape} of {where}; resume with the recipe (base model and peft) that wrote it"
    )
