"""Checkpoints of weights that are sharded over ranks: one file, or a folder to which each rank writes its shards.

A file is an ordinary Lightning checkpoint with full tensors. A folder is torch's distributed checkpoint, which stores
tensors by name, independent of how they were sharded: it can be read under any strategy and any number of ranks.
``meta.pt`` in it is the rest of Lightning's checkpoint, ``manifest.json`` the sizes and checksums of its files.
"""

import copy
import shutil
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lit_callbacks.distributed.failures import failing_together
from lit_callbacks.distributed.gather import full_tensor, named_weights
from lit_callbacks.export.manifest import file_sums, write_manifest
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from lit_ft.checkpointing.storage import replacement
from lit_ft.checkpointing.storage.checksum import save_without_sum
from lit_ft.checkpointing.storage.failures import explain_failed_load, explain_failed_save
from lit_ft.checkpointing.storage.integrity import HAS_MANIFEST, META
from lit_ft.checkpointing.storage.metadata_reader import SafeFileSystemReader
from lit_ft.errors import RecipeError
from lit_ft.internals.torch import tree_map
from lit_ft.protocols import Checkpoint

SAVED_GROUPS = "saved_groups"
"""Key in what is read from a folder: each optimizer's groups of parameters when it was written, and their names."""

OptimizerState = dict[str, Any]
"""State dict of an optimizer: ``state`` by the index of a parameter, and ``param_groups``."""
StageContent = tuple[list[str], list[tuple[OptimizerState, list[str]]]]
"""Names of a pipeline stage's weights; for each optimizer, its state without tensors and its parameters' names."""


def is_sharded_folder(path: Path) -> bool:
    """Whether it is a folder that ``save_sharded`` wrote."""
    return (path / META).is_file()


# --- full states, for files ----------------------------------------------------------------------


def gather(state: OptimizerState, keep: bool) -> OptimizerState:
    """Gather a state dict with full tensors on the CPU; a collective. Ranks without ``keep`` get None per tensor."""

    def whole(leaf: object) -> object:
        if not isinstance(leaf, Tensor):
            return leaf
        tensor = full_tensor(leaf)
        return tensor.cpu() if keep else None

    return tree_map(whole, state)


def split_like(parameter: Tensor, tensor: Tensor) -> Tensor:
    """Shard of a full tensor for this rank, sharded like ``parameter``; the tensor itself if that is no ``DTensor``."""
    if not isinstance(parameter, DTensor) or isinstance(tensor, DTensor):
        return tensor
    # No communication: every rank has the full tensor, usually mapped from the same file.
    mesh = parameter.device_mesh
    split = distribute_tensor(
        tensor.to(device=mesh.device_type, dtype=tensor.dtype), mesh, parameter.placements, src_data_rank=None
    )
    return split if parameter.device.type == mesh.device_type else split.to(parameter.device)


def split_state(optimizer: Optimizer, state: OptimizerState) -> OptimizerState:
    """Saved state of an optimizer with each tensor sharded like the parameter that it belongs to."""
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


def _is_of(parameter: Tensor, value: object) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape


# --- parts of an optimizer's state --------------------------------------------------------------------


def select_optimizer_state(
    saved: OptimizerState, names: Sequence[str], groups: Sequence[Sequence[str]]
) -> OptimizerState:
    """Select the entries of some parameters from an optimizer's state dict.

    Args:
        saved: state dict of the optimizer.
        names: names of its parameters, in order.
        groups: names of the selected parameters, by group of the optimizer that will load them.

    Raises:
        RecipeError: the state dict does not have one of them.
    """
    index_of = {name: index for index, name in enumerate(names)}
    if missing := [name for group in groups for name in group if name not in index_of]:
        raise RecipeError(
            f"the checkpoint has no optimizer state for {missing[0]} and {len(missing) - 1} others; resume with the "
            "recipe that wrote it"
        )
    settings = {index: group for group in saved["param_groups"] for index in group["params"]}
    order = [name for group in groups for name in group]
    numbers = iter(range(len(order)))
    own_groups = [{**settings[index_of[group[0]]], "params": [next(numbers) for _ in group]} for group in groups]
    state = {i: saved["state"][index_of[name]] for i, name in enumerate(order) if index_of[name] in saved["state"]}
    return {"state": state, "param_groups": own_groups}


def merge_optimizer_states(
    parts: Sequence[tuple[OptimizerState, Sequence[str]]], order: Sequence[str]
) -> tuple[OptimizerState, list[str]]:
    """Merge the state dicts of optimizers with different parameters: the inverse of ``select_optimizer_state``.

    Args:
        parts: state dicts, each with the names of its parameters in order.
        order: names of all parameters of the full model, in order.

    Returns:
        The merged state dict, and the names of its parameters in order. A single part stays as it is.
    """
    if len(parts) == 1:
        (state, names), *_ = parts
        return state, list(names)
    rank = {name: index for index, name in enumerate(order)}
    groups: list[tuple[dict[str, object], set[str]]] = []
    states: dict[str, object] = {}
    for state, names in parts:
        after = 0
        for group in state["param_groups"]:
            settings = {key: value for key, value in group.items() if key != "params"}
            # Groups of one part stay apart, also if they are alike: only those of other parts are joined.
            alike = (i for i, (known, _) in enumerate(groups) if i >= after and known == settings)
            position = next(alike, None)
            if position is None:
                groups.insert(after, (settings, set()))
                position = after
            groups[position][1].update(names[index] for index in group["params"])
            after = position + 1
        states |= {names[index]: value for index, value in state["state"].items()}
    joined = [name for _, members in groups for name in sorted(members, key=lambda name: rank[name])]
    index_of = {name: index for index, name in enumerate(joined)}
    return {
        "state": {index_of[name]: value for name, value in states.items()},
        "param_groups": [{**known, "params": sorted(index_of[n] for n in members)} for known, members in groups],
    }, joined


# --- folders -----------------------------------------------------------------------------------------


def save_sharded(
    checkpoint: Checkpoint,
    path: Path,
    names: Sequence[Sequence[str]],
    join_stages: Callable[[StageContent], list[StageContent]] = lambda own: [own],
    order: Sequence[str] = (),
    background: dist.ProcessGroup | None = None,
) -> Future[None] | None:
    """Write a checkpoint folder, to which each rank adds its shards; a collective.

    Args:
        checkpoint: Lightning checkpoint with sharded tensors.
        path: path of the folder; an earlier checkpoint there is replaced.
        names: names of each optimizer's parameters, in order.
        join_stages: function that gathers an object from the ranks of all pipeline stages.
        order: names of all parameters, if pipeline stages hold different ones.
        background: CPU process group, to write a copy of the shards in the background; None writes before returning.

    Returns:
        With ``background``, a future; the folder has its final name when it is done.
    """
    tensors: dict[str, Tensor] = {
        f"weights/{name}": tensor.detach() for name, tensor in checkpoint["state_dict"].items()
    }
    described: list[tuple[OptimizerState, list[str]]] = []
    has_optimizers = "optimizer_states" in checkpoint  # not with weights alone
    named = zip(checkpoint["optimizer_states"], names, strict=True) if has_optimizers else ()
    for number, (state, own) in enumerate(named):
        others: dict[int, dict[str, object]] = {}
        for index, values in state["state"].items():
            for key, value in values.items():
                if isinstance(value, Tensor):
                    tensors[f"optimizer.{number}/{key}/{own[index]}"] = value
                else:
                    others.setdefault(index, {})[key] = value
        described.append(({"state": others, "param_groups": state["param_groups"]}, list(own)))
    stages = join_stages((list(checkpoint["state_dict"]), described))
    rest = {**checkpoint, "state_dict": sorted({name for weights, _ in stages for name in weights})}
    of_optimizers = zip(*(described for _, described in stages), strict=True)
    joined = [merge_optimizer_states(parts, order or parts[0][1]) for parts in of_optimizers]
    if has_optimizers:
        rest["optimizer_states"] = [{"state": state, "names": names} for state, names in joined]
    temporary = replacement.temporary_folder(path)
    with explain_failed_save(path):
        _start_anew(temporary)
    if background is None:
        with explain_failed_save(path, temporary):
            dcp.save(tensors, checkpoint_id=temporary)  # waits for all ranks
            _finish(temporary, path, rest)
        return None
    rest = copy.deepcopy(rest)  # callbacks go on, e.g. with their lists of the best checkpoints
    # It returns once all tensors are copied to host memory, also those that are there.
    writing = dcp.async_save(tensors, checkpoint_id=temporary, process_group=background)
    assert isinstance(writing, Future), "only other kinds of stagers return something else"
    finished: Future[None] = Future()
    writing.add_done_callback(lambda written: _finish_later(finished, written, temporary, path, rest, background))
    return finished


def _start_anew(temporary: Path) -> None:
    """Remove the leftovers of a killed process before any rank writes, and make the folder that it is in.

    Lightning may link to the checkpoint before a background process has written it.
    """
    with failing_together():
        if dist.get_rank() == 0:
            temporary.parent.mkdir(parents=True, exist_ok=True)
            if temporary.exists():
                shutil.rmtree(temporary)


def _finish_later(
    finished: "Future[None]",
    written: "Future[None]",
    temporary: Path,
    path: Path,
    rest: Checkpoint,
    group: dist.ProcessGroup,
) -> None:
    try:
        with explain_failed_save(path, temporary):
            written.result()
            _finish(temporary, path, rest, group)
        finished.set_result(None)
    except Exception as error:
        finished.set_exception(error)


def _finish(temporary: Path, path: Path, rest: Checkpoint, group: dist.ProcessGroup | None = None) -> None:
    """Write the manifest of a folder that all ranks have written, and rename it to its final name; a collective.

    Each rank computes the checksums of the files that it wrote, which are still in its memory.
    """
    with failing_together(group):
        own = file_sums(temporary, [file.name for file in temporary.glob(f"__{dist.get_rank()}_*")])
    parts = [own] * dist.get_world_size()
    dist.all_gather_object(parts, own, group=group)
    with failing_together(group):
        if dist.get_rank() == 0:
            save_without_sum({**rest, HAS_MANIFEST: True}, temporary / META)
            sums = {name: entry for part in parts for name, entry in part.items()}
            write_manifest(temporary, sums=sums)
            replacement.replace(temporary, path)


def load_sharded(
    path: Path, module: nn.Module, groups: Sequence[Sequence[Sequence[str]]], aliases: Mapping[str, str] | None = None
) -> Checkpoint:
    """Read a Lightning checkpoint with tensors sharded like the module's; each rank reads only its shards.

    Args:
        path: path of the folder.
        module: module whose parameters and persistent buffers define which tensors are read and how they are sharded.
        groups: names of each optimizer's parameters, by group.
        aliases: from names of tied parameters in the module to the names under which their optimizer state is saved.
    """
    rest = torch.load(path / META, map_location="cpu", weights_only=True)
    own = dict(named_weights(module))
    own_by_name = own | {known: own[name] for name, known in (aliases or {}).items()}
    tensors: dict[str, Tensor] = {
        f"weights/{name}": torch.empty_like(own[name], requires_grad=False)
        for name in rest["state_dict"]
        if name in own
    }
    saved = _sizes(path)
    keys = _optimizer_keys(saved) if groups else {}
    for number, of_optimizer in enumerate(groups):
        for name in (name for group in of_optimizer for name in group):
            for key in keys.get((number, name), ()):
                like, entry = own_by_name[name], saved[key]
                tensors[key] = (
                    torch.empty_like(like, dtype=entry.properties.dtype, requires_grad=False)
                    if entry.size == like.shape
                    else torch.empty(entry.size, dtype=entry.properties.dtype)
                )
    with explain_failed_load(path):
        dcp.load(tensors, storage_reader=SafeFileSystemReader(path))
    whole = _as_lightning(rest, tensors)
    if groups:
        saved_states = rest["optimizer_states"]
        whole[SAVED_GROUPS] = [(entry["state"]["param_groups"], entry["names"]) for entry in saved_states]
    # During validation there are no optimizers.
    whole["optimizer_names"] = [[name for group in of_optimizer for name in group] for of_optimizer in groups]
    whole["optimizer_states"] = [
        select_optimizer_state(state, entry["names"], of_optimizer)
        for state, entry, of_optimizer in zip(
            whole["optimizer_states"], rest.get("optimizer_states", []), groups, strict=bool(groups)
        )
    ]
    return whole


def read_full(path: Path) -> Checkpoint:
    """Read a Lightning checkpoint from a folder with full tensors, for a process that holds all weights."""
    rest = torch.load(path / META, map_location="cpu", weights_only=True)
    tensors: dict[str, Tensor] = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype) for key, entry in _sizes(path).items()
    }
    with warnings.catch_warnings(), explain_failed_load(path):
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # that is the intent
        dcp.load(tensors, storage_reader=SafeFileSystemReader(path), no_dist=True)
    return _as_lightning(rest, tensors)


def shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the weights in a folder; the weights are not read."""
    return {
        key.removeprefix("weights/"): tuple(entry.size)
        for key, entry in _sizes(path).items()
        if key.startswith("weights/")
    }


def _sizes(path: Path) -> dict[str, TensorStorageMetadata]:
    metadata = SafeFileSystemReader(path).read_metadata().state_dict_metadata
    return {key: entry for key, entry in metadata.items() if isinstance(entry, TensorStorageMetadata)}


def _optimizer_keys(saved: Iterable[str]) -> dict[tuple[int, str], list[str]]:
    """Keys of saved optimizer state by number of the optimizer and name of the parameter."""
    keys: dict[tuple[int, str], list[str]] = {}
    for key in saved:
        kind, _, what_and_name = key.partition("/")
        if kind.startswith("optimizer."):
            owner = int(kind.removeprefix("optimizer.")), what_and_name.partition("/")[2]
            keys.setdefault(owner, []).append(key)
    return keys


def _as_lightning(rest: Checkpoint, tensors: dict[str, Tensor]) -> Checkpoint:
    states = []
    saved = rest.get("optimizer_states", [])
    for number, entry in enumerate(saved):
        state = {index: dict(values) for index, values in entry["state"]["state"].items()}
        index_of = {name: index for index, name in enumerate(entry["names"])}
        for key, value in tensors.items():
            if key.startswith(f"optimizer.{number}/"):
                _, what, name = key.split("/", 2)
                state.setdefault(index_of[name], {})[what] = value
        states.append({"state": state, "param_groups": entry["state"]["param_groups"]})
    weights = {key.removeprefix("weights/"): value for key, value in tensors.items() if key.startswith("weights/")}
    names = [entry["names"] for entry in saved]
    return {**rest, "state_dict": weights, "optimizer_states": states, "optimizer_names": names}
