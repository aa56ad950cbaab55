"""Megatron's ``torch_dist`` format, by plain ``torch.distributed.checkpoint`` in one process.

Layers are stacked: ``decoder.layers.x`` has the shape ``(layers, ...)``, and a weight of experts that of ``(layers,
experts, ...)``. Each layer's weight is a chunk of it, so a layer is written and read alone. Checkpoints of models whose
layers differ have a key per layer; these are read too. Beside the chunks Megatron asks for ``metadata.json``,
``common.pt`` with its arguments, and an empty object for the state that Transformer Engine keeps of each linear layer.
"""

import dataclasses
import io
import json
import pickle
import shutil
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch
from lit_callbacks.durable_writes import sync, write_durably
from torch import Tensor
from torch.distributed import checkpoint
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from lit_ft.checkpointing.storage.checksum import save_without_sum
from lit_ft.checkpointing.storage.failures import cause_of
from lit_ft.checkpointing.storage.metadata_reader import SafeFileSystemReader
from lit_ft.errors import RecipeError, explained
from lit_ft.megatron.families import EMBEDDING, FINAL_NORM, HEAD, Key, layer_keys
from lit_ft.megatron.formats.names import Naming, extra_state, parse
from lit_ft.megatron.formats.safe_pickle import load
from lit_ft.megatron.layout import Layout
from lit_ft.megatron.shape import ModelShape

_VERSIONS = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
"""Content of metadata.json."""
INDEX = ".metadata"
"""Index of the chunks."""


class _Reader(SafeFileSystemReader):
    """Reader of indices that Megatron wrote: they also hold its plans, and entries that are not tensors."""

    classes: ClassVar[Mapping[str, set[str]]] = {
        **SafeFileSystemReader.classes,
        "torch.distributed.checkpoint.metadata": {
            *SafeFileSystemReader.classes["torch.distributed.checkpoint.metadata"],
            "BytesStorageMetadata",
        },
        "torch.distributed.checkpoint.planner": {
            *("BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"),
        },
    }


class _Chunk(NamedTuple):
    """Place of a weight: a stacked tensor, and the weight's number in its first dimensions."""

    name: str
    offsets: tuple[int, ...]


class TorchDistSource:
    """Checkpoint in the ``torch_dist`` format."""

    layout: Layout | None = None

    def __init__(self, folder: Path, prefix: str = "") -> None:
        """Read the index and the arguments.

        Args:
            folder: folder of the files.
            prefix: prefix of the weights' names, which tells the weights themselves from a state of the optimizer.

        Raises:
            RecipeError: the index cannot be read, or a file that it names is missing.
        """
        self._reader = _Reader(folder)
        metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        files = sorted({info.relative_path for info in metadata.storage_data.values()})
        if missing := [name for name in files if not (folder / name).is_file()]:
            raise RecipeError(
                f"{len(missing)} of {len(files)} files missing, the first of them {folder / missing[0]}; copy the "
                "files of all ranks"
            )
        common = folder / "common.pt"
        self.common = load(common) if common.is_file() else {}
        """What the ranks have in common."""
        self.arguments: Namespace = self.common.get("args", Namespace())
        stored = metadata.state_dict_metadata.items()
        tensors = {name: entry for name, entry in stored if isinstance(entry, TensorStorageMetadata)}
        of_model = {name for name in tensors if not name.startswith(("optimizer.", "chained_"))}
        self._sizes = {name: entry.size for name, entry in tensors.items()}
        self._tensors = {
            name: entry for name, entry in tensors.items() if (name.startswith(prefix) if prefix else name in of_model)
        }
        self.stored_names = set(self._tensors)
        """Names of the tensors as they are stored: layers are stacked."""
        self.has_optimizer = len(of_model) < len(tensors)
        embedding = self._tensors.get(f"{prefix}{EMBEDDING.megatron}")
        self.rows = embedding.size[0] if embedding is not None else 0
        self._stored = {name: {(c.offsets, c.sizes) for c in entry.chunks} for name, entry in self._tensors.items()}
        self._chunks: dict[str, _Chunk] = {}
        for name, tensor in self._tensors.items():
            for key, offsets in _weights_in(name.removeprefix(prefix), tensor.size):
                self._chunks[key] = _Chunk(name, offsets)

    def names(self) -> set[str]:
        """Names of the weights."""
        return set(self._chunks)

    def parts(self, key: Key) -> list[Tensor]:
        """The weight, in a list of one."""
        name, offsets = self._chunks[key.megatron]
        tensor = self._tensors[name]
        shape = tensor.size[len(offsets) :]
        box = ChunkStorageMetadata(
            offsets=torch.Size((*offsets, *[0] * len(shape))), sizes=torch.Size((*[1] * len(offsets), *shape))
        )
        if (box.offsets, box.sizes) in self._stored[name]:  # no search among the chunks of all layers and experts
            tensor = dataclasses.replace(tensor, chunks=[box])
        target = torch.empty(box.sizes, dtype=tensor.properties.dtype)
        items = create_read_items_for_chunk_list(name, tensor, [box])
        with explained(f"{self._reader.path}: {name}", "copy the files again"):
            self._reader.read_data(LoadPlan(items), _Into(target)).wait()
        if sum(torch.Size(item.lengths).numel() for item in items) != target.numel():
            raise RecipeError(f"{self._reader.path}: chunks of {name} are missing; copy the files of all ranks")
        return [target.reshape(shape)]

    def has_like_weights(self, prefix: str) -> bool:
        """Whether each stored tensor of the model has one of its size with a prefix before its name."""
        return all(self._sizes.get(f"{prefix}{name}") == self._sizes[name] for name in self._tensors)

    def dtype(self, key: Key) -> torch.dtype:
        """Dtype of a weight."""
        dtype: torch.dtype = self._tensors[self._chunks[key.megatron].name].properties.dtype
        return dtype


def _weights_in(name: str, size: torch.Size) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Weights in a stacked tensor: name and number in its first dimensions."""
    own, layer, expert = parse(name)
    is_stacked = layer is None and name.startswith("decoder.layers.")
    layers = range(size[0]) if is_stacked else [layer]
    experts = range(size[1 if is_stacked else 0]) if "{expert}" in own and expert is None else [expert]
    for one_layer in layers:
        for one_expert in experts:
            full = own.format(expert=one_expert)
            key = full if one_layer is None else f"decoder.layers.{one_layer}.{full}"
            stacked = [one_layer] if is_stacked else []
            stacked += [one_expert] if expert is None and one_expert is not None else []
            yield key, tuple(number for number in stacked if number is not None)


class _Into(checkpoint.DefaultLoadPlanner):
    """Planner that puts what is read into one tensor."""

    def __init__(self, target: Tensor) -> None:
        super().__init__()
        self._target = target

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """View of the target that a chunk fills."""
        view = self._target
        for dimension, (first, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            view = view.narrow(dimension, first, length)
        return view

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing is left to do."""


class _OneByOne(SavePlanner):
    """Planner that gets each tensor only when it is written."""

    def __init__(self, items: list[WriteItem], get: Callable[[WriteItem], Tensor | io.BytesIO]) -> None:
        self._items, self._get = items, get

    def set_up_planner(self, state_dict: object, storage_meta: object = None, is_coordinator: bool = False) -> None:
        """Nothing is needed: the items are known."""

    def create_local_plan(self) -> SavePlan:
        """All items."""
        return SavePlan(self._items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """The plans as they are."""
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """The plan as it is."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """Tensor or bytes to write now."""
        return self._get(write_item)


def write_parts(
    shape: ModelShape,
    naming: Naming,
    rows: int,
    dtype: Callable[[Key], torch.dtype],
    weight: Callable[[Key], Tensor],
    prefix: str,
) -> Iterator[tuple[str, Callable[[Path], None]]]:
    """Folders to write: one per layer and one of the other weights, each a checkpoint of its own.

    Args:
        shape: sizes of the model.
        naming: names in the files.
        rows: rows of the padded vocabulary.
        dtype: gives the dtype of a weight.
        weight: gives a weight.
        prefix: prefix of the weights' names, which tells the weights themselves from a state of the optimizer.
    """
    others = [Key(EMBEDDING), Key(FINAL_NORM)] + ([] if shape.is_tied else [Key(HEAD)])
    parts = [others, *(list(layer_keys(shape.family, i, range(shape.experts))) for i in range(shape.layers))]
    for number, keys in enumerate(parts):

        def write(path: Path, keys: list[Key] = keys) -> None:
            items: list[WriteItem] = []
            sources: dict[MetadataIndex, Key] = {}
            for key in keys:
                item = _tensor_item(f"{prefix}{_name(key, naming)}", key, shape, rows, dtype(key))
                items.append(item)
                sources[item.index] = key
                items.extend(() if prefix else _extra_state_item(key, shape, naming))

            def get(item: WriteItem) -> Tensor | io.BytesIO:
                if item.type == WriteItemType.BYTE_IO:
                    torch.save([None], buffer := io.BytesIO())
                    buffer.seek(0)
                    return buffer
                assert item.tensor_data is not None
                return weight(sources[item.index]).reshape(item.tensor_data.chunk.sizes)

            writer = FileSystemWriter(path, per_thread_copy_ahead=0)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is intended
                try:
                    checkpoint.save({}, storage_writer=writer, planner=_OneByOne(items, get), no_dist=True)
                except checkpoint.CheckpointException as error:
                    raise cause_of(error) from error

        yield f"part_{prefix}{number:05d}", write


def _stack(key: Key, shape: ModelShape) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes of the dimensions in which a weight is stacked, and the weight's number in them."""
    pairs = [(shape.layers, key.layer), (shape.experts, key.expert)]
    used = [(size, number) for size, number in pairs if number is not None]
    return tuple(size for size, _ in used), tuple(number for _, number in used)


def _name(key: Key, naming: Naming) -> str:
    name = naming.within_layer(key.weight.megatron, key.expert)
    return name if key.layer is None else f"decoder.layers.{name}"


def _tensor_item(name: str, key: Key, shape: ModelShape, rows: int, dtype: torch.dtype) -> WriteItem:
    parts = [shape.shape_of(part) for part in key.weight.parts]
    own = (rows if key.weight.is_padded else sum(part[0] for part in parts), *parts[0][1:])
    sizes, numbers = _stack(key, shape)
    offsets = torch.Size((*numbers, *[0] * len(own)))
    chunk = ChunkStorageMetadata(offsets=offsets, sizes=torch.Size((*[1] * len(numbers), *own)))
    data = TensorWriteData(chunk, TensorProperties(dtype=dtype), torch.Size((*sizes, *own)))
    return WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data)


def _extra_state_item(key: Key, shape: ModelShape, naming: Naming) -> Iterator[WriteItem]:
    """Item of the state that Transformer Engine keeps of a linear layer, under the name of its shard."""
    name = _name(key, naming)
    if key.layer is None or (extra := extra_state(name)) is None:
        return
    sizes, numbers = _stack(key, shape)
    shard = f"shard_{'.'.join(map(str, numbers))}_{'.'.join(map(str, sizes))}"
    yield WriteItem(MetadataIndex(f"{extra}/{shard}"), WriteItemType.BYTE_IO)


def join_parts(folder: Path, arguments: Namespace, of_optimizer: Mapping[str, object] | None = None) -> None:
    """Make one checkpoint of the parts in a folder, and write the files that Megatron asks for beside the chunks.

    Args:
        folder: folder with the ``part_*`` folders, whose files are moved.
        arguments: arguments of Megatron.
        of_optimizer: further entries of ``common.pt``, for the optimizer.
    """
    tensors: dict[str, TensorStorageMetadata] = {}
    whole = Metadata(state_dict_metadata={}, storage_data={})
    parts = sorted(folder.glob("part_*"))
    for number, part in enumerate(parts):
        metadata = _Reader(part).read_metadata()
        for name, entry in metadata.state_dict_metadata.items():
            known = tensors.get(name)
            if known is not None and isinstance(entry, TensorStorageMetadata):
                known.chunks.extend(entry.chunks)
                continue
            whole.state_dict_metadata[name] = entry
            if isinstance(entry, TensorStorageMetadata):
                tensors[name] = entry
        for index, info in metadata.storage_data.items():
            name = f"__{number}_0.distcp"
            whole.storage_data[index] = dataclasses.replace(info, relative_path=name)
            if (file := part / info.relative_path).is_file():
                file.rename(folder / name)
    write_durably(folder / "metadata.json", json.dumps(_VERSIONS))
    common = {"args": arguments, "checkpoint_version": 3.0, "iteration": arguments.iteration}
    save_without_sum({**common, **(of_optimizer or {})}, folder / "common.pt")
    temporary = folder / f"{INDEX}.partial"
    with temporary.open("wb") as file:
        pickle.dump(whole, file)
    sync(temporary)
    temporary.rename(folder / INDEX)  # last: where it is, nothing is missing
    sync(folder)


def remove_parts(folder: Path) -> None:
    """Remove the folders whose files ``join_parts`` has taken."""
    for part in folder.glob("part_*"):
        shutil.rmtree(part)
