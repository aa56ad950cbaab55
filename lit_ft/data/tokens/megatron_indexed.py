"""Megatron-LM's indexed data sets: ``PREFIX.bin`` holds token ids, ``PREFIX.idx`` the offset of each sequence.

The layout is that of ``megatron.core.datasets.indexed_dataset`` (version 1), little-endian::

    "MMIDIDX\\0\\0"  version: uint64  dtype code: uint8  sequences: uint64  documents + 1: uint64
    tokens per sequence: int32[]  bytes before each sequence: int64[]  sequences before each document: int64[]
"""

import struct
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from lit_ft.errors import RecipeError

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = "<QBQQ"
_DTYPES: dict[int, type[np.integer]] = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
_LARGEST_UINT16_VOCABULARY = 65_500
"""Vocabulary size from which Megatron's ``DType.optimal_dtype`` chooses int32 in place of uint16."""


def read_documents(prefix: Path) -> tuple[np.ndarray, np.ndarray]:
    """Memory-map an indexed data set.

    Args:
        prefix: path of the two files without ``.bin`` and ``.idx``.

    Returns:
        All token ids, ``(tokens,)``, and the begin and end of each non-empty document, ``(documents, 2)``, int64.

    Raises:
        RecipeError: a file is missing, damaged, or of another format.
    """
    index, tokens = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    for file in (index, tokens):
        if not file.is_file():
            raise RecipeError(f"{file} does not exist; an indexed data set is two files, {prefix.name}.bin and .idx")
    content = np.memmap(index, mode="r") if index.stat().st_size else np.zeros(0, dtype=np.uint8)
    start = len(_MAGIC) + struct.calcsize(_HEADER)
    if bytes(content[: len(_MAGIC)]) != _MAGIC or len(content) < start:
        raise RecipeError(f"{index} is no Megatron index (it does not begin with {_MAGIC!r}); name another file")
    version, code, sequences, entries = struct.unpack(_HEADER, bytes(content[len(_MAGIC) : start]))
    if version != 1 or code not in _DTYPES:
        raise RecipeError(f"{index}: version {version}, dtype code {code}; version 1 with whole numbers is read")
    if len(content) < start + 12 * sequences + 8 * entries:
        raise RecipeError(f"{index} is truncated: {len(content)} bytes for {sequences} sequences; write it again")
    lengths = np.frombuffer(content, dtype="<i4", count=sequences, offset=start)
    pointers = np.frombuffer(content, dtype="<i8", count=sequences, offset=start + 4 * sequences)
    documents = np.frombuffer(content, dtype="<i8", count=entries, offset=start + 12 * sequences)
    dtype = np.dtype(_DTYPES[code])
    if (lengths < 0).any() or (documents < 0).any() or (documents > sequences).any() or (np.diff(documents) < 0).any():
        raise RecipeError(f"{index} is damaged: its sequences or documents do not follow one another; write it again")
    if tokens.stat().st_size < int(lengths.astype(np.int64).sum()) * dtype.itemsize:
        raise RecipeError(
            f"{tokens} is truncated: {tokens.stat().st_size} bytes; {index.name} says more; write it again"
        )
    begins = np.append(pointers // dtype.itemsize, 0)
    ends = np.append(pointers // dtype.itemsize + lengths, 0)
    if len(begins) and not 0 <= begins.min() <= ends.max() <= tokens.stat().st_size // dtype.itemsize:
        raise RecipeError(f"{index} is damaged: it points outside {tokens.name}; write it again")
    filled = documents[:-1] < documents[1:]
    spans = np.stack([begins[documents[:-1][filled]], ends[documents[1:][filled] - 1]], axis=1)
    ids = np.memmap(tokens, dtype=dtype, mode="r").view(np.ndarray) if len(spans) else np.zeros(0, dtype=dtype)
    return ids, spans[spans[:, 0] < spans[:, 1]].astype(np.int64)


class IndexedWriter:
    """Writer of indexed data sets, one document at a time, like Megatron's ``IndexedDatasetBuilder``."""

    def __init__(self, prefix: Path, vocabulary: int) -> None:
        """Open ``PREFIX.bin``.

        Args:
            prefix: path of the two files without suffix.
            vocabulary: number of token ids, which decides between two and four bytes per token.
        """
        self.prefix = prefix
        self.dtype = np.dtype(np.uint16 if vocabulary < _LARGEST_UINT16_VOCABULARY else np.int32)
        self.lengths: list[int] = []
        self._file = Path(f"{prefix}.bin").open("wb")  # noqa: SIM115 (close() closes it)

    def add(self, document: np.ndarray | Iterable[int]) -> None:
        """Append a document of one sequence."""
        ids = np.asarray(document, dtype=self.dtype)
        self._file.write(ids.tobytes(order="C"))
        self.lengths.append(len(ids))

    def close(self) -> None:
        """Close ``PREFIX.bin`` and write ``PREFIX.idx``."""
        self._file.close()
        code = next(code for code, dtype in _DTYPES.items() if np.dtype(dtype) == self.dtype)
        count = len(self.lengths)
        lengths = np.array(self.lengths, dtype="<i4")
        before = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])[:-1] * self.dtype.itemsize
        with Path(f"{self.prefix}.idx").open("wb") as file:
            file.write(_MAGIC + struct.pack(_HEADER, 1, code, count, count + 1))
            for array in (lengths, before.astype("<i8"), np.arange(count + 1, dtype="<i8")):
                file.write(array.tobytes())
