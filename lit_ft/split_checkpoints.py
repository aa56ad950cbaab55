"""Checkpoints of weights that are split over ranks: one file, or a folder to which each rank writes its share.

A file is what every Lightning run writes, whole tensors and all. A folder is torch's distributed checkpoint, whose
tensors have names of their own and no memory of how they were split: it is read under any strategy and any number
of ranks. ``meta.pt`` in it is the rest of Lightning's checkpoint.
"""

import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from lit_callbacks.gather import whole_tensor
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

META = "meta.pt"


def is_folder_of_shares(path: Path) -> bool:
    """Whether it is a folder that ``save_shares`` wrote."""
    return (path / META).is_file()


# --- whole states, for files -------------------------------------------------------------------------


def gather(state: Any, keep: bool) -> Any:
    """A state dict with whole tensors on the CPU; a collective. Ranks that do not ``keep`` it get None for each."""

    def whole(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        tensor = whole_tensor(leaf)
        return tensor.cpu() if keep else None

    return tree_map(whole, state)


def split_like(parameter: Tensor, tensor: Tensor) -> Tensor:
    """This rank's share of a whole tensor, as a ``DTensor`` where the parameter is one."""
    if not isinstance(parameter, DTensor) or isinstance(tensor, DTensor):
        return tensor
    # No communication: every rank has the whole tensor, as a rule mapped from the same file.
    mesh = parameter.device_mesh
    split = distribute_tensor(
        tensor.to(device=mesh.device_type, dtype=tensor.dtype), mesh, parameter.placements, src_data_rank=None
    )
    return split if parameter.device.type == mesh.device_type else split.to(parameter.device)


def split_state(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """An optimiser's saved state in which each tensor is split as the parameter it belongs to."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {
        **state,
        "state": {
            index: {
                key: split_like(parameters[index], value) if _is_of(parameters[index], value) else value
                for key, value in values.items()
            }
            for index, values in state["state"].items()
        },
    }


def _is_of(parameter: Tensor, value: Any) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape


# --- folders -----------------------------------------------------------------------------------------


def save_shares(checkpoint: dict[str, Any], path: Path, names: Sequence[Sequence[str]]) -> None:
    """Write each rank's share.

    Args:
        checkpoint: Lightning's, with split tensors.
        path: the folder; an earlier checkpoint there is replaced.
        names: for each optimiser, its parameters' names in order.
    """
    tensors: dict[str, Any] = {f"weights/{name}": tensor.detach() for name, tensor in checkpoint["state_dict"].items()}
    rest = {**checkpoint, "state_dict": list(checkpoint["state_dict"]), "optimizer_states": []}
    for place, (state, order) in enumerate(zip(checkpoint.get("optimizer_states", []), names, strict=True)):
        others: dict[str, Any] = {}
        for index, values in state["state"].items():
            for key, value in values.items():
                into = tensors if isinstance(value, Tensor) else others
                into[f"optimizer.{place}/{key}/{order[index]}"] = value
        rest["optimizer_states"].append({"param_groups": state["param_groups"], "names": list(order), "others": others})
    temporary = path.with_name(f".{path.name}.new")
    dcp.save(tensors, checkpoint_id=temporary)  # waits for all ranks
    if torch.distributed.get_rank() == 0:
        torch.save(rest, temporary / META)
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        temporary.rename(path)


def load_shares(
    path: Path, module: nn.Module, optimizers: Sequence[Optimizer], names: Sequence[Sequence[str]]
) -> dict[str, Any]:
    """Lightning's checkpoint, its tensors split as the module's; each rank reads its share only."""
    rest = torch.load(path / META, map_location="cpu", weights_only=True)
    own = dict(module.named_parameters(remove_duplicate=False))
    tensors: dict[str, Any] = {
        f"weights/{name}": torch.empty_like(own[name], requires_grad=False)
        for name in rest["state_dict"]
        if name in own
    }
    saved = _sizes(path)
    for place, order in enumerate(names):
        for name in order:
            for key in _keys(saved, place, name):
                tensors[key] = (
                    torch.empty_like(own[name], dtype=saved[key].properties.dtype, requires_grad=False)
                    if saved[key].size == own[name].shape
                    else torch.empty(saved[key].size, dtype=saved[key].properties.dtype)
                )
    dcp.load(tensors, checkpoint_id=path)
    return _as_lightning(rest, tensors, names)


def read_whole(path: Path) -> dict[str, Any]:
    """Lightning's checkpoint from a folder, with whole tensors in memory: for a process that holds all weights."""
    rest = torch.load(path / META, map_location="cpu", weights_only=True)
    tensors: dict[str, Any] = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype) for key, entry in _sizes(path).items()
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # that is the intent
        dcp.load(tensors, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    return _as_lightning(rest, tensors, [entry["names"] for entry in rest["optimizer_states"]])


def shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the weights in a folder; they are not read."""
    return {
        key.removeprefix("weights/"): tuple(entry.size)
        for key, entry in _sizes(path).items()
        if key.startswith("weights/")
    }


def _sizes(path: Path) -> dict[str, TensorStorageMetadata]:
    metadata = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    return {key: entry for key, entry in metadata.items() if isinstance(entry, TensorStorageMetadata)}


def _keys(saved: dict[str, TensorStorageMetadata], place: int, name: str) -> list[str]:
    return [key for key in saved if key.startswith(f"optimizer.{place}/") and key.split("/", 2)[2] == name]


def _as_lightning(rest: dict[str, Any], tensors: dict[str, Any], names: Sequence[Sequence[str]]) -> dict[str, Any]:
    states = []
    # A validation has no optimizers to give states to.
    for place, (entry, order) in enumerate(zip(rest["optimizer_states"], names, strict=bool(names))):
        state: dict[int, dict[str, Any]] = {}
        for key, value in {**tensors, **entry["others"]}.items():
            if key.startswith(f"optimizer.{place}/"):
                _, what, name = key.split("/", 2)
                state.setdefault(order.index(name), {})[what] = value
        states.append({"state": state, "param_groups": entry["param_groups"]})
    weights = {key.removeprefix("weights/"): value for key, value in tensors.items() if key.startswith("weights/")}
    return {**rest, "state_dict": weights, "optimizer_states": states}
