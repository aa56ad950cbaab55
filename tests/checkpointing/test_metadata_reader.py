"""Sharded checkpoints that want to run code, or to read other files."""

import os
import pickle
from dataclasses import replace
from enum import Enum
from pathlib import Path, PosixPath
from typing import IO, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from lit_ft import RecipeError
from lit_ft.checkpointing.storage import sharded
from lit_ft.checkpointing.storage.metadata_reader import SafeFileSystemReader


class Command:
    """Unpickling it runs a command."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.mark}",)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A folder as ``save_sharded`` writes it."""
    folder = tmp_path / "last.ckpt"
    tensors = {
        "weights/a": torch.arange(6.0).view(2, 3),
        "weights/b": torch.ones(1, 2, 3, 4, dtype=torch.bfloat16).to(memory_format=torch.channels_last),
        "optimizer.0/exp_avg/a": torch.ones(2, 3, dtype=torch.float64),
    }
    dcp.save(tensors, checkpoint_id=folder, no_dist=True)
    entry = {"state": {"state": {}, "param_groups": []}, "names": ["a", "b"]}
    torch.save({"state_dict": ["a", "b"], "optimizer_states": [entry]}, folder / sharded.META)
    return folder


def index_of(checkpoint: Path) -> Metadata:
    return pickle.loads((checkpoint / ".metadata").read_bytes())


def write_index(checkpoint: Path, metadata: Any) -> None:
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))


def test_a_checkpoint_is_read_as_torch_reads_it(checkpoint: Path) -> None:
    ours = SafeFileSystemReader(checkpoint).read_metadata()
    torchs = dcp.FileSystemReader(checkpoint).read_metadata()
    assert ours.state_dict_metadata == torchs.state_dict_metadata
    assert ours.storage_data == torchs.storage_data
    whole = sharded.read_full(checkpoint)
    assert whole["state_dict"]["a"].tolist() == [[0, 1, 2], [3, 4, 5]]


class ByGetattr(pickle.Pickler):
    """Pickler of Python 3.11.0 to 3.11.3, which stores a member of an enumeration as a call of ``getattr``."""

    def __init__(self, file: IO[bytes], attribute: str | None = None) -> None:
        super().__init__(file)
        self.attribute = attribute

    def reducer_override(self, value: object) -> Any:
        if isinstance(value, Enum):
            return getattr, (type(value), self.attribute or value.name)
        return NotImplemented


def test_an_index_that_an_early_python_311_wrote_is_read(checkpoint: Path) -> None:
    metadata = index_of(checkpoint)
    with (checkpoint / ".metadata").open("wb") as file:
        ByGetattr(file).dump(metadata)
    assert b"getattr" in (checkpoint / ".metadata").read_bytes()
    assert SafeFileSystemReader(checkpoint).read_metadata().state_dict_metadata == metadata.state_dict_metadata
    with (checkpoint / ".metadata").open("wb") as file:
        ByGetattr(file, attribute="__init__").dump(metadata)
    with pytest.raises(RecipeError, match=r"names code that no checkpoint needs \(getattr of .*, '__init__'\)"):
        sharded.read_full(checkpoint)


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
def test_an_index_of_another_python_is_read(checkpoint: Path, module: str) -> None:
    """3.13 names the class of paths in another module than those before and after it."""
    metadata = index_of(checkpoint)
    written, ours = pickle.dumps(metadata, protocol=3), f"c{PosixPath.__module__}\nPosixPath\n".encode()
    assert ours in written
    (checkpoint / ".metadata").write_bytes(written.replace(ours, f"c{module}\nPosixPath\n".encode()))
    assert SafeFileSystemReader(checkpoint).read_metadata().state_dict_metadata == metadata.state_dict_metadata


def test_an_index_runs_no_code(checkpoint: Path, tmp_path: Path) -> None:
    for metadata in (Command(tmp_path / "ran"), replace(index_of(checkpoint), planner_data=Command(tmp_path / "ran"))):
        write_index(checkpoint, metadata)
        for read in (sharded.read_full, sharded.shapes):
            with pytest.raises(RecipeError, match=r"\.metadata names code that no checkpoint needs \(posix\.system\)"):
                read(checkpoint)
    assert not (tmp_path / "ran").exists()


def test_an_entry_that_is_no_tensor_runs_no_code(checkpoint: Path, tmp_path: Path) -> None:
    """torch unpickles such entries, whatever was asked for."""
    metadata = index_of(checkpoint)
    metadata.state_dict_metadata["weights/a"] = BytesStorageMetadata()
    stored = next(stored for index, stored in metadata.storage_data.items() if index.fqn == "weights/a")
    torch.save(Command(tmp_path / "ran"), checkpoint / "evil.distcp")
    stored.relative_path, stored.offset = "evil.distcp", 0
    stored.length = (checkpoint / "evil.distcp").stat().st_size
    write_index(checkpoint, metadata)
    with pytest.raises(RecipeError, match="names code that no checkpoint needs .*BytesStorage"):
        sharded.read_full(checkpoint)
    with pytest.raises(dcp.api.CheckpointException):  # torch 2.11 leaves out the reason
        dcp.load({"weights/a": torch.zeros(2, 3)}, storage_reader=SafeFileSystemReader(checkpoint), no_dist=True)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("elsewhere", ["../elsewhere.distcp", "/elsewhere.distcp"])
def test_an_index_names_no_file_outside(checkpoint: Path, elsewhere: str) -> None:
    metadata = index_of(checkpoint)
    next(iter(metadata.storage_data.values())).relative_path = elsewhere
    write_index(checkpoint, metadata)
    with pytest.raises(RecipeError, match="points outside of the folder"):
        sharded.read_full(checkpoint)


@pytest.mark.parametrize("content", [b"", b"garbage", pickle.dumps([1]), pickle.dumps(3)[:-1]])
def test_a_damaged_index_is_an_error_of_one_line(checkpoint: Path, content: bytes) -> None:
    (checkpoint / ".metadata").write_bytes(content)
    with pytest.raises(RecipeError, match="no sharded checkpoint that can be read") as error:
        sharded.read_full(checkpoint)
    assert "\n" not in str(error.value)
