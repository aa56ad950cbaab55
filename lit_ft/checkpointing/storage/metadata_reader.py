"""Reader for the index of a sharded checkpoint that runs no code contained in the checkpoint.

``torch.distributed.checkpoint`` stores the index in ``.metadata``, a plain pickle, and also unpickles entries that are
not tensors. A checkpoint of this project has only tensors.
"""

import pickle
import posixpath
from collections.abc import Mapping
from enum import Enum, EnumMeta
from pathlib import PurePosixPath
from typing import IO, ClassVar

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from lit_ft.errors import RecipeError

_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
}
"""Classes that an index may contain, besides dtypes and shapes."""
_PATHLIB = ("pathlib", "pathlib._local")
"""Modules of ``PosixPath``: the second is that of Python 3.13."""


class SafeFileSystemReader(FileSystemReader):
    """torch's reader of sharded checkpoints, safe for folders from untrusted sources."""

    classes: ClassVar[Mapping[str, set[str]]] = _CLASSES
    """Classes that an index may name, by module."""

    # Because this method has no parameter named `kwargs`, torch does not try another index if this one is refused.

    def read_metadata(self, *args: object, **options: object) -> Metadata:
        """Read the index of the folder.

        Raises:
            RecipeError: the index is unreadable, names code (as entries that are not tensors do), or names a file
                outside the folder.
        """
        path = self._get_metadata_path()
        try:
            with open(path, "rb") as file:
                metadata = _MetadataUnpickler(file, self.classes).load()
            _check_files(metadata)
        except _Refused as error:
            message = f"{str(self.path)!r} is not read: its .metadata {error}; take another checkpoint"
            raise RecipeError(message) from error
        except Exception as error:  # a damaged pickle raises nearly anything
            raise RecipeError(
                f"{str(self.path)!r} is no sharded checkpoint that can be read (.metadata: {type(error).__name__}: "
                f"{error}); take another checkpoint"
            ) from error
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Refused(Exception):
    """The reason why an index is not used."""


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickler that resolves only the classes of an index."""

    def __init__(self, file: IO[bytes], classes: Mapping[str, set[str]]) -> None:
        super().__init__(file)
        self._classes = classes

    def find_class(self, module: str, name: str) -> object:
        if module in _PATHLIB and name == "PosixPath":
            return posixpath.join  # the path becomes a plain string: a class could be modified by the pickle
        if (module, name) == ("builtins", "getattr"):
            return _member
        is_torch_value = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_torch_value or (module, name) == ("torch", "Size") or name in self._classes.get(module, ()):
            return super().find_class(module, name)
        raise _Refused(f"names code that no checkpoint needs ({module}.{name})")


def _member(kind: object, name: str) -> Enum:
    """Member of an enumeration, which Python 3.11.0 to 3.11.3 store as a call of ``getattr``."""
    if isinstance(kind, EnumMeta) and name in kind.__members__:
        return kind.__members__[name]
    raise _Refused(f"names code that no checkpoint needs (getattr of {kind}, {name!r})")


def _check_files(metadata: Metadata) -> None:
    for stored in metadata.storage_data.values():
        file = PurePosixPath(stored.relative_path)
        if file.is_absolute() or ".." in file.parts:
            raise _Refused(f"points outside of the folder ({str(file)!r})")
