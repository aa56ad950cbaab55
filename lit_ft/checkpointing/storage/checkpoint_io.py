"""Reading and writing of checkpoints, which hold only the trainable parameters of a model."""

from collections import OrderedDict
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import torch
from lightning.pytorch.plugins import TorchCheckpointIO
from lit_callbacks.distributed.gather import full_numel, full_shape
from torch import Tensor, nn
from torch.serialization import get_unsafe_globals_in_checkpoint

from lit_ft.checkpointing.storage import checksum, replacement, sharded
from lit_ft.checkpointing.storage.failures import explain_failed_save
from lit_ft.checkpointing.storage.integrity import check_on_rank_zero
from lit_ft.errors import RecipeError
from lit_ft.protocols import Checkpoint

Shapes = dict[str, tuple[int, ...]]


class AnyCheckpointIO(TorchCheckpointIO):
    """Reading and writing of checkpoint files with a SHA-256 sum, and reading of sharded checkpoint folders.

    A file is written under a temporary name and then renamed, so that a kill at any moment leaves the earlier
    checkpoint or the new one. URLs such as ``s3://`` are written by Lightning's own class, without a sum.
    """

    def save_checkpoint(self, checkpoint: Checkpoint, path: str | Path, storage_options: object = None) -> None:
        """Write one file; an earlier checkpoint of that name, file or folder, is removed afterwards.

        Raises:
            RecipeError: the disk is full or cannot be written; the earlier checkpoint is kept.
        """
        if "://" in str(path) or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        path = Path(path)
        temporary = replacement.temporary_file(path)
        with explain_failed_save(path, temporary):
            path.parent.mkdir(parents=True, exist_ok=True)
            checksum.save(checkpoint, temporary)
            replacement.replace(temporary, path)

    def load_checkpoint(self, path: str | Path, *args: Any, **options: Any) -> Checkpoint:
        """Read a checkpoint with full tensors.

        Raises:
            DamagedCheckpoint: the checkpoint does not match its checksums.
        """
        if "://" in str(path):
            return super().load_checkpoint(path, *args, **options)
        if not Path(path).exists():
            raise RecipeError(f"checkpoint {str(path)!r} does not exist; name a .ckpt file or folder of a run")
        check_on_rank_zero(Path(path))
        if sharded.is_sharded_folder(Path(path)):
            return sharded.read_full(Path(path))
        return super().load_checkpoint(path, *args, **options)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a file or a folder; a kill in the middle leaves no partial checkpoint."""
        if "://" in str(path):
            super().remove_checkpoint(path)
        else:
            replacement.remove(Path(path))


class WeightCount(NamedTuple):
    """Number of parameters of a model, and number and bytes of the trainable ones."""

    trained: int
    total: int
    trained_bytes: int

    @classmethod
    def of(cls, model: nn.Module) -> "WeightCount":
        """Count a model before layers are dropped from it; weights that ZeRO-3 has sharded count in full."""
        trains = [p for p in model.parameters() if p.requires_grad]
        return cls(
            sum(map(full_numel, trains)),
            sum(map(full_numel, model.parameters())),
            sum(full_numel(p) * p.element_size() for p in trains),
        )


def trainable_shapes(module: nn.Module) -> Shapes:
    """Names and full shapes of the trainable parameters, tied aliases included."""
    trains = {n: p for n, p in module.named_parameters(remove_duplicate=False) if p.requires_grad}
    return {name: full_shape(p) for name, p in trains.items()}


def shapes_of(state_dict: dict[str, Tensor]) -> Shapes:
    """Names and shapes of saved weights."""
    return {name: tuple(tensor.shape) for name, tensor in state_dict.items()}


def saved_shapes(ckpt_path: str) -> Shapes:
    """Names and shapes of a checkpoint file's weights; the weights themselves are not read.

    Raises:
        RecipeError: the file is no Lightning checkpoint.
    """
    if sharded.is_sharded_folder(Path(ckpt_path)):
        return sharded.shapes(Path(ckpt_path))
    return shapes_of(_read(ckpt_path)["state_dict"])


def saved_value(ckpt_path: str, key: str) -> Any:
    """Entry of a checkpoint by its key, as ``SavedState`` or Lightning wrote it; None where there is none.

    Raises:
        RecipeError: the file is no Lightning checkpoint.
    """
    return _read(ckpt_path).get(key)


def mapped(path: Path) -> Checkpoint:
    """Checkpoint whose tensors are mapped into memory; those of a sharded folder are read.

    Raises:
        RecipeError: it is no Lightning checkpoint.
    """
    return sharded.read_full(path) if sharded.is_sharded_folder(path) else _read(str(path))


def _read(ckpt_path: str) -> Checkpoint:
    try:
        file = Path(ckpt_path)
        if sharded.is_sharded_folder(file):
            file = file / sharded.META
        checkpoint = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
        checkpoint["state_dict"]
        return checkpoint
    except (OSError, RuntimeError, KeyError, ValueError, TypeError, UnpicklingError) as error:
        raise RecipeError(
            f"ckpt_path={ckpt_path!r} is no Lightning checkpoint ({type(error).__name__}); name a .ckpt file of a run"
        ) from error


def check_fit(saved: Shapes, expected: Shapes) -> None:
    """Compare a checkpoint's weights with the trainable parameters of the model.

    Raises:
        RecipeError: names or shapes differ.
    """
    if saved == expected:
        return
    differing = sorted(set(saved.items()) ^ set(expected.items()))
    name, shape = differing[0]
    where = "the checkpoint" if saved.get(name) == shape else "the model"
    differ = len({name for name, _ in differing})
    raise RecipeError(
        f"the checkpoint does not fit the model: {differ} of {len({*saved, *expected})} weights "
        f"differ, e.g. {name} {shape} of {where}; resume with the recipe (base model and peft) that wrote it"
    )


def check_readable(content: Mapping[str, object], what: str) -> None:
    """Refuse entries of a checkpoint that it could be written with, and not read: objects of Python classes.

    Args:
        content: entries by name.
        what: what they are, for the message.

    Raises:
        RecipeError: there is one; the message names the classes.
    """
    for name, entry in content.items():
        torch.save(_without_tensors(entry), file := BytesIO())
        file.seek(0)
        # Up to Python 3.11.3 a member of an enum is pickled as an attribute of its class.
        if classes := sorted({*get_unsafe_globals_in_checkpoint(file)} - {"builtins.getattr"}):
            raise RecipeError(
                f"{what}: {name} holds objects of {', '.join(classes)}, and no run would go on from a checkpoint with "
                "them: reading one allows tensors and plain values alone; take another class, or give its state as such"
            )


def _without_tensors(entry: object) -> object:
    if type(entry) in (dict, OrderedDict):  # no other class of dictionary
        return {name: _without_tensors(inner) for name, inner in entry.items()}  # type: ignore[attr-defined]
    if type(entry) in (list, tuple):
        return [_without_tensors(inner) for inner in entry]  # type: ignore[attr-defined]
    return None if isinstance(entry, Tensor) else entry
