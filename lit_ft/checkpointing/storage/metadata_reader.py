"""Index of a sharded checkpoint, read without running code that the checkpoint brings.

``torch.distributed.checkpoint`` keeps it in ``.metadata``, a plain pickle, and unpickles entries that are no tensors
too. A checkpoint of this project has tensors only.
"""

import pickle
import posixpath
from pathlib import PurePosixPath
from typing import Any

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
"""What the index of a checkpoint is made of, besides dtypes and shapes."""


class SafeFileSystemReader(FileSystemReader):
    """torch's reader of sharded checkpoints, for folders that come from anyone."""

    # Without a parameter `kwargs` torch looks for no other index where this one is refused.

    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        """The index of the folder.

        Raises:
            RecipeError: it is unreadable, names code (an entry that is no tensor does), or a file outside the folder.
        """
        path = self._get_metadata_path()
        try:
            with open(path, "rb") as file:
                metadata = _MetadataUnpickler(file).load()
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
    """Finds the classes of an index, and no other name."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("pathlib", "PosixPath"):
            return posixpath.join  # the folder that was written to; as text, it is no class that could be altered
        is_torch_value = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_torch_value or (module, name) == ("torch", "Size") or name in _CLASSES.get(module, ()):
            return super().find_class(module, name)
        raise _Refused(f"names code that no checkpoint needs ({module}.{name})")


def _check_files(metadata: Metadata) -> None:
    for stored in metadata.storage_data.values():
        file = PurePosixPath(stored.relative_path)
        if file.is_absolute() or ".." in file.parts:
            raise _Refused(f"points outside of the folder ({str(file)!r})")
