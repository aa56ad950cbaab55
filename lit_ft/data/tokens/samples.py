"""The tokenized data: flat arrays on disk, and a view of some samples of several sources."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lit_ft.packed_batch import IGNORE_INDEX


@dataclass(frozen=True)
class TokenArrays:
    """Token ids and labels of one source, laid end to end; memory-mapped where they lie on disk."""

    ids: np.ndarray
    """``(tokens,)``, any integer type."""
    labels: np.ndarray
    """``(tokens,)``, unshifted; ``IGNORE_INDEX`` where not supervised."""
    offsets: np.ndarray
    """``(samples, 2)``, int64: where sample i begins and ends."""
    rows: np.ndarray
    """``(samples,)``, int64: the row of the source that a sample comes from, from 0."""
    supervised: np.ndarray
    """``(samples,)``, int64, targets per sample; a sample's first token is never one."""

    @property
    def lengths(self) -> np.ndarray:
        """``(samples,)``, int64, tokens per sample."""
        return self.offsets[:, 1] - self.offsets[:, 0]

    def __len__(self) -> int:
        return len(self.offsets)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        start, end = self.offsets[index]
        return self.ids[start:end], self.labels[start:end]


ARRAYS = ("ids", "labels", "offsets", "rows", "supervised")


def collect(ids: np.ndarray, labels: np.ndarray, lengths: np.ndarray, rows: np.ndarray | None = None) -> TokenArrays:
    """Samples that lie end to end."""
    ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    is_target = np.asarray(labels) != IGNORE_INDEX
    is_target[ends[:-1][lengths > 0]] = False
    supervised = np.diff(np.concatenate([[0], np.cumsum(is_target)])[ends])
    offsets = np.stack([ends[:-1], ends[1:]], axis=1)
    return TokenArrays(ids, labels, offsets, np.arange(len(lengths)) if rows is None else rows, supervised)


def write_arrays(folder: Path, arrays: TokenArrays) -> None:
    """Save to a folder that ``read_arrays`` maps."""
    for name in ARRAYS:
        np.save(folder / f"{name}.npy", getattr(arrays, name))


def read_arrays(folder: Path) -> TokenArrays:
    """Map what ``write_arrays`` saved; nothing is read before it is used."""
    # As plain arrays over the mapping: each slice of a np.memmap costs more than laying out a sample.
    return TokenArrays(**{name: np.load(folder / f"{name}.npy", mmap_mode="r").view(np.ndarray) for name in ARRAYS})


@dataclass(frozen=True)
class Samples:
    """Some samples of some sources, in the sources' order."""

    parts: Sequence[TokenArrays]
    names: tuple[str, ...]
    """The sources' names, each the name of a loss curve."""
    source: np.ndarray
    """``(samples,)``: which part a sample is of."""
    index: np.ndarray
    """``(samples,)``: its place there."""
    lengths: np.ndarray = field(init=False)
    """``(samples,)``, tokens per sample."""
    supervised: np.ndarray = field(init=False)
    """``(samples,)``, targets per sample."""
    rows: np.ndarray = field(init=False)
    """``(samples,)``: the row of its source that a sample comes from."""

    def __post_init__(self) -> None:
        for name in ("lengths", "supervised", "rows"):
            values = np.zeros(len(self.source), dtype=np.int64)
            for number, part in enumerate(self.parts):
                mine = self.source == number
                values[mine] = getattr(part, name)[self.index[mine]]
            object.__setattr__(self, name, values)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return self.parts[self.source[index]][self.index[index]]

    def take(self, chosen: np.ndarray) -> "Samples":
        """Those samples only; ``chosen`` is a mask or holds indices."""
        return Samples(self.parts, self.names, self.source[chosen], self.index[chosen])

    def ids(self, chosen: Sequence[int]) -> list[str]:
        """``source:row`` of each, ``row`` alone where there is one source; its later pieces end in ``.1`` and so on."""
        ids = []
        for i in chosen:
            part = int(self.source[i])
            row = self.rows[i]
            piece = self.index[i] - np.searchsorted(self.parts[part].rows, row)
            source = f"{self.names[part]}:" if self.names else ""
            ids.append(f"{source}{row}.{piece}" if piece else f"{source}{row}")
        return ids

    def sources_of(self, chosen: Sequence[int]) -> list[str]:
        """The name of each one's source, empty where there is one source."""
        return [self.names[self.source[i]] if self.names else "" for i in chosen]

    def digests(self) -> np.ndarray:
        """``(samples,)``, uint64: equal for samples of equal ids and labels."""
        return np.array([_digest(*self[i]) for i in range(len(self))], dtype=np.uint64)


def _digest(ids: np.ndarray, labels: np.ndarray) -> int:
    import xxhash  # comes with datasets

    content: Any = (np.asarray(ids, dtype=np.int32).tobytes(), np.asarray(labels, dtype=np.int32).tobytes())
    return xxhash.xxh3_64_intdigest(b"".join(content))


def join(parts: Sequence[TokenArrays], names: Sequence[str]) -> Samples:
    """All samples of some sources."""
    source = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    index = np.concatenate([np.arange(len(part)) for part in parts] or [np.zeros(0, dtype=np.int64)])
    return Samples(parts, tuple(names), source, index)
