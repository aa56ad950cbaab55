"""Tokenized data: flat arrays, in memory or memory-mapped from disk, and a view of samples of several sources."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from os import SEEK_END
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash  # comes with datasets

from lit_ft.errors import RecipeError
from lit_ft.packed_batch import IGNORE_INDEX, Conversation, RowValues


@dataclass(frozen=True)
class TokenArrays:
    """Concatenated token ids and labels of one source; memory-mapped if they are on disk."""

    ids: np.ndarray
    """``(tokens,)``, any integer type."""
    labels: np.ndarray
    """``(tokens,)``, unshifted; ``IGNORE_INDEX`` where not supervised."""
    offsets: np.ndarray
    """``(samples, 2)``, int64: begin and end of each sample."""
    rows: np.ndarray
    """``(samples,)``, int64: row number of each sample in its source, from 0."""
    supervised: np.ndarray
    """``(samples,)``, int64, targets per sample; a sample's first token is never one, nor that of an answer's half."""
    chosen: np.ndarray | None = None
    """``(samples,)``, int64, where samples are pairs: tokens of the chosen conversation, which come before those of the
    rejected one; None where they are not. One of both is empty where answers are unpaired."""

    @property
    def lengths(self) -> np.ndarray:
        """``(samples,)``, int64, tokens per sample."""
        return self.offsets[:, 1] - self.offsets[:, 0]

    @cached_property
    def digests(self) -> np.ndarray:
        """``(samples,)``, uint64, equal for samples of equal ids and labels; they are computed once."""
        return np.array([_digest(self.ids[a:b], self.labels[a:b]) for a, b in self.offsets.tolist()], dtype=np.uint64)

    @cached_property
    def groups(self) -> np.ndarray:
        """``(samples,)``, uint64, equal for samples that no split parts: equal ones, and pairs of one prompt."""
        if self.chosen is None:
            return self.digests
        prompts = zip(self.offsets[:, 0].tolist(), self.prompts.tolist(), strict=True)
        return np.array([_digest(self.ids[a : a + n], self.labels[a : a + n]) for a, n in prompts], dtype=np.uint64)

    @cached_property
    def prompts(self) -> np.ndarray:
        """``(samples,)``, int64: tokens of a sample before its first supervised one."""
        starts = [self.labels[a:b] != IGNORE_INDEX for a, b in self.offsets.tolist()]
        return np.array([np.argmax(is_supervised) for is_supervised in starts], dtype=np.int64)

    def parted(self, index: int) -> tuple[Conversation, Conversation]:
        """Prompt of a sample, and the answer with what follows; of a pair those of its first conversation."""
        start, end = self.conversations(np.array([index]))[0]
        border = start + self.prompts[index]
        prompt, answer = slice(start, border), slice(border, end)
        return (self.ids[prompt], self.labels[prompt]), (self.ids[answer], self.labels[answer])

    @property
    def each(self) -> int:
        """Conversations of each sample."""
        return 2 if self.chosen is not None and not self.is_unpaired else 1

    @cached_property
    def is_unpaired(self) -> bool:
        """Whether samples are pairs of which one answer is missing."""
        return self.chosen is not None and bool(((self.chosen == 0) | (self.chosen == self.lengths)).all())

    def conversations(self, index: np.ndarray) -> np.ndarray:
        """Begin and end of each of some samples, ``(conversations, 2)``, int64; of a pair those of both answers."""
        if self.chosen is None:
            return self.offsets[index]
        starts, ends = self.offsets[index].T
        borders = starts + self.chosen[index]
        spans = np.stack([starts, borders, borders, ends], axis=1).reshape(-1, 2)
        return spans[spans[:, 0] < spans[:, 1]]

    def __len__(self) -> int:
        return len(self.offsets)

    def __getitem__(self, index: int) -> Conversation:
        start, end = self.offsets[index]
        return self.ids[start:end], self.labels[start:end]


def _digest(ids: np.ndarray, labels: np.ndarray) -> int:
    content = (np.asarray(ids, dtype=np.int32).tobytes(), np.asarray(labels, dtype=np.int32).tobytes())
    return xxhash.xxh3_64_intdigest(b"".join(content))


_ALIKE = 16
"""First tokens of samples that are compared."""
_ROW_OF_ID = re.compile(r"(\d+)(?:\.\d+)?$")
ARRAYS = ("ids", "labels", "offsets", "rows", "supervised")
CHOSEN = "chosen"
"""Array that there is for pairs alone."""


def collect(
    ids: np.ndarray,
    labels: np.ndarray,
    lengths: np.ndarray,
    rows: np.ndarray | None = None,
    chosen: np.ndarray | None = None,
) -> TokenArrays:
    """Build ``TokenArrays`` from concatenated samples.

    Args:
        ids: token ids, ``(tokens,)``.
        labels: labels, ``(tokens,)``, unshifted.
        lengths: tokens per sample, ``(samples,)``.
        rows: row number of each sample, ``(samples,)``; None numbers them from 0.
        chosen: tokens of the chosen conversation of each pair, ``(samples,)``; None where samples are no pairs.
    """
    ends = np.cumsum(lengths, dtype=np.int64)
    offsets = np.stack([ends - lengths, ends], axis=1)
    rows = np.arange(len(lengths)) if rows is None else rows
    if chosen is None:
        return TokenArrays(ids, labels, offsets, rows, targets_of(labels, lengths))
    of_halves = targets_of(labels, np.stack([chosen, lengths - chosen], axis=1).reshape(-1))
    return TokenArrays(ids, labels, offsets, rows, of_halves.reshape(-1, 2).sum(1), chosen)


def targets_of(labels: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Targets of each of some concatenated samples, ``(samples,)``, int64; a sample's first token is never one."""
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    is_target = np.asarray(labels) != IGNORE_INDEX
    has_tokens = lengths > 0
    is_target[starts[has_tokens]] = False
    targets = np.zeros(len(lengths), dtype=np.int64)
    # Not by cumulative sums of all tokens, which take twice the memory of ids and labels; int32 takes half of one.
    targets[has_tokens] = np.add.reduceat(is_target, starts[has_tokens], dtype=np.int32)
    return targets


class ArrayFiles:
    """``.npy`` files that are written part by part: no part stays in memory, and a full disk has its error number."""

    def __init__(self, folder: Path, names: Iterable[str]) -> None:
        self._files = {name: (folder / f"{name}.npy").open("wb") for name in names}
        self._lengths = dict.fromkeys(self._files, 0)
        self._types: dict[str, np.dtype] = {}

    def add(self, **parts: np.ndarray) -> None:
        """Append a part to each of some arrays."""
        for name, part in parts.items():
            assert self._types.setdefault(name, part.dtype) == part.dtype
            file, self._lengths[name] = self._files[name], self._lengths[name] + len(part)
            shape = (self._lengths[name], *part.shape[1:])
            file.seek(0)  # a header is padded, and so of one size for all lengths
            header = {"descr": part.dtype.str, "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, header)
            file.seek(0, SEEK_END)
            file.write(np.ascontiguousarray(part).data)

    def close(self) -> None:
        """Write what is buffered."""
        for file in self._files.values():
            file.close()


def read_arrays(folder: Path) -> TokenArrays:
    """Memory-map arrays that ``ArrayFiles`` wrote; data is read when it is used."""
    # Views as plain arrays: a slice of a np.memmap costs more than packing a sample.
    names = [*ARRAYS, *([CHOSEN] if (folder / f"{CHOSEN}.npy").exists() else [])]
    return TokenArrays(**{name: np.load(folder / f"{name}.npy", mmap_mode="r").view(np.ndarray) for name in names})


@dataclass(frozen=True, eq=False)
class Samples:
    """View of selected samples of one or several sources."""

    parts: Sequence[TokenArrays]
    names: tuple[str, ...]
    """Names of the sources' loss curves; empty where there is one source."""
    source: np.ndarray
    """``(samples,)``: source number of each sample, an index into ``parts``."""
    index: np.ndarray
    """``(samples,)``: index of each sample within its part."""
    partners: np.ndarray | None = None
    """``(samples, 2)``: source and index of the sample whose answer stands beside the prompt of each in ``mismatched``;
    None before ``with_partners``."""
    values: Sequence[Mapping[int, RowValues]] | None = None
    """By source and row, what rewards read of a row; None where they read nothing of it."""
    lengths: np.ndarray = field(init=False)
    """``(samples,)``, tokens per sample."""
    supervised: np.ndarray = field(init=False)
    """``(samples,)``, targets per sample."""
    rows: np.ndarray = field(init=False)
    """``(samples,)``: row number of each sample in its source."""

    def __post_init__(self) -> None:
        for name in ("lengths", "supervised", "rows"):
            values = self._gathered([getattr(part, name) for part in self.parts], np.int64)
            object.__setattr__(self, name, values)

    def _gathered(self, parts: Sequence[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
        """Values of these samples, ``(samples,)``, of those of all samples of each part."""
        values = np.zeros(len(self.source), dtype)
        for number, part in enumerate(parts):
            mine = self.source == number
            values[mine] = part[self.index[mine]]
        return values

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Conversation:
        return self.parts[self.source[index]][self.index[index]]

    @cached_property
    def of_one_beginning(self) -> np.ndarray | None:
        """``(samples,)``, int64, equal for samples of one row that begin alike, so that a packed batch computes their
        first tokens once: answers of a conversation whose template writes earlier turns otherwise. None without any.
        """
        follows = (np.diff(self.rows) == 0) & (np.diff(self.source) == 0)
        if self.has_pairs or not follows.any():
            return None
        for i in np.flatnonzero(follows).tolist():
            (one, _), (other, _) = self[i], self[i + 1]
            follows[i] = np.array_equal(one[:_ALIKE], other[:_ALIKE])
        return np.concatenate([[0], np.cumsum(~follows)]) if follows.any() else None

    @property
    def has_pairs(self) -> bool:
        """Whether the samples are pairs of preference data; of mixtures, either all are or none is."""
        return bool(self.parts) and self.parts[0].chosen is not None

    @property
    def is_unpaired(self) -> bool:
        """Whether the samples are pairs of which one answer is missing."""
        return self.has_pairs and all(part.is_unpaired for part in self.parts)

    @cached_property
    def is_rejected(self) -> np.ndarray:
        """``(samples,)``, int8: 1 where the chosen answer of a pair is missing, else 0."""
        parts = [np.zeros(0) if part.chosen is None else part.chosen == 0 for part in self.parts]
        return self._gathered(parts, np.int8)

    @property
    def judgments(self) -> str:
        """Text with the numbers of good and of bad answers, of unpaired ones."""
        bad = int(self.is_rejected.sum())
        return f"{len(self) - bad:,} good, {bad:,} bad"

    @property
    def conversations_each(self) -> int:
        """Conversations of each sample: 2 of a pair, if it is complete."""
        return max((part.each for part in self.parts), default=1)

    @property
    def kind(self) -> str:
        """What a sample is: sample, pair, or judged answer."""
        return "judged answer" if self.is_unpaired else "pair" if self.has_pairs else "sample"

    def pair(self, index: int) -> tuple[Conversation, Conversation]:
        """Ids and labels of the chosen and of the rejected conversation of a sample that is a pair."""
        chosen = self.parts[self.source[index]].chosen
        assert chosen is not None, "only pairs have two conversations"
        (ids, labels), border = self[index], int(chosen[self.index[index]])
        return (ids[:border], labels[:border]), (ids[border:], labels[border:])

    def conversations(self, index: int) -> Sequence[Conversation]:
        """Ids and labels of a sample, or of the conversations of a pair."""
        return [half for half in self.pair(index) if len(half[0])] if self.has_pairs else [self[index]]

    def answers_in(self, chosen: Sequence[int]) -> tuple[int, ...]:
        """Whether some pairs have chosen answers (0) and rejected ones (1); nothing for samples that are no pairs."""
        if not self.is_unpaired:
            return (0, 1) if self.has_pairs else ()
        return tuple(np.unique(self.is_rejected[chosen]).tolist())

    def with_partners(self) -> "Samples":
        """These samples, with the next one that answers another prompt for each; after the last comes the first again.

        Raises:
            ValueError: all answer one prompt.
        """
        count, groups = len(self), self.groups()
        changes = np.flatnonzero(groups != np.roll(groups, -1))  # the last of each run of one prompt
        if not len(changes):
            raise ValueError("all samples answer one prompt")
        found = (changes[np.searchsorted(changes, np.arange(count)) % len(changes)] + 1) % count
        partners = np.stack([self.source[found], self.index[found]], axis=1)
        return replace(self, partners=partners)

    def mismatched(self, index: int) -> Conversation:
        """A pair's prompt with the answer of its partner, which alone is supervised.

        They are cut at the longer one of both conversations.
        """
        assert self.partners is not None, "with_partners finds them"
        both = (self.source[index], self.index[index]), self.partners[index]
        (prompt, own), (other, answer) = (self.parts[source].parted(int(at)) for source, at in both)
        longest = max(len(prompt[0]) + len(own[0]), len(other[0]) + len(answer[0]))
        ids, labels = (np.concatenate([prompt[k], answer[k]])[:longest] for k in (0, 1))
        return ids, labels

    @property
    def longest(self) -> int:
        """Tokens of the longest sample, of pairs of the longest conversation; 0 where there is none."""
        if not self.has_pairs:
            return int(self.lengths.max(initial=0))
        parts = enumerate(self.parts)
        spans = np.concatenate([part.conversations(self.index[self.source == number]) for number, part in parts])
        return int((spans[:, 1] - spans[:, 0]).max(initial=0))

    def take(self, chosen: np.ndarray) -> "Samples":
        """Select samples; ``chosen`` is a mask or an array of indices."""
        partners = None if self.partners is None else self.partners[chosen]
        return replace(self, source=self.source[chosen], index=self.index[chosen], partners=partners)

    def ids(self, chosen: Sequence[int]) -> list[str]:
        """Ids of samples: ``source:row``, or ``row`` where there is one source; later pieces of a row add ``.1``."""
        ids = []
        for i in chosen:
            part = int(self.source[i])
            row = self.rows[i]
            piece = self.index[i] - np.searchsorted(self.parts[part].rows, row)
            source = f"{self.names[part]}:" if self.names else ""
            ids.append(f"{source}{row}.{piece}" if piece else f"{source}{row}")
        return ids

    def find(self, ids: Sequence[str]) -> dict[str, int]:
        """Indices of samples by their ids; unknown ids are left out."""
        rows = [int(match[1]) for match in map(_ROW_OF_ID.search, ids) if match]
        # Of these rows alone: ids of millions of samples take seconds and gigabytes.
        near = np.flatnonzero(np.isin(self.rows, rows))
        found = dict(zip(self.ids(near.tolist()), near.tolist(), strict=True))
        return {name: found[name] for name in ids if name in found}

    def sources_of(self, chosen: Sequence[int]) -> list[str]:
        """Source name of each sample, empty where there is one source."""
        return [self.names[self.source[i]] if self.names else "" for i in chosen]

    def values_of(self, chosen: Sequence[int]) -> list[RowValues]:
        """What rewards read of the row of each of some samples."""
        assert self.values is not None, "DataSplits.read_values finds it"
        return [self.values[self.source[i]][int(self.rows[i])] for i in chosen]

    def digests(self) -> np.ndarray:
        """Digest of each sample, ``(samples,)``, uint64; equal for samples of equal ids and labels."""
        return self._gathered([part.digests for part in self.parts], np.uint64)

    def groups(self) -> np.ndarray:
        """Group of each sample, ``(samples,)``, uint64; no split parts those of one group."""
        return self._gathered([part.groups for part in self.parts], np.uint64)


def join(parts: Sequence[TokenArrays], names: Sequence[str]) -> Samples:
    """Combine all samples of several sources."""
    source = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    index = np.concatenate([np.arange(len(part)) for part in parts] or [np.zeros(0, dtype=np.int64)])
    return Samples(parts, tuple(names), source, index)


class HeldOut(NamedTuple):
    """Samples that are held out for validation."""

    mask: np.ndarray
    """``(samples,)``, bool."""
    counts: list[tuple[int, int]]
    """Rows of each source that are held out, and all its rows."""
    shared: int
    """Rows that are held out and that another source has too, or of pairs their prompts."""


def held_out_samples(samples: Samples, fraction: float, seed: int, paths: Sequence[str]) -> HeldOut:
    """Choose a fraction of each source's distinct rows, at least one, for validation.

    Equal rows stay together, also those of several sources, and pairs of one prompt.

    Raises:
        RecipeError: a source has no row left to train on.
    """
    # Samples of a row, and rows of a source, stand together; a row is that of its first sample.
    places = np.stack([samples.source, samples.rows])
    is_first = np.append(True, (places[:, 1:] != places[:, :-1]).any(0))
    groups, source = samples.groups()[is_first], samples.source[is_first]  # (rows,)
    different = [np.unique(groups[source == number]) for number in range(len(paths))]
    held_out = np.isin(groups, _drawn(different, fraction, seed))
    counts = [(int(held_out[source == number].sum()), int((source == number).sum())) for number in range(len(paths))]
    for path, own, (count, rows) in zip(paths, different, counts, strict=True):
        if count == rows:
            what = f"{len(own)} different {'prompts' if samples.has_pairs else 'rows'} of {path!r}"
            beside, advice = "", "lower it" if len(own) > 1 else "add rows, or set data.val_path in its place"
            if _share(own, fraction) < len(own):
                beside, advice = " and those held out of other sources", "lower it, or remove from one what both have"
            raise RecipeError(f"data.val_fraction={fraction} of {what}{beside} leaves none to train on; {advice}")
    values, sources = np.unique(np.concatenate(different), return_counts=True)
    shared = int(np.isin(groups[held_out], values[sources > 1]).sum())
    return HeldOut(held_out[np.cumsum(is_first) - 1], counts, shared)


def _share(groups: np.ndarray, fraction: float) -> int:
    return max(1, round(len(groups) * fraction))


def _drawn(different: Sequence[np.ndarray], fraction: float, seed: int) -> np.ndarray:
    """Draw groups of rows, a fraction of the different ones of each source; those of a source before it count."""
    generator = np.random.default_rng(seed)
    drawn = seen = np.zeros(0, dtype=np.uint64)
    for own in different:
        order = own[generator.permutation(len(own))]
        # First those that no source before has, whose fraction would grow with each source.
        order = order[np.argsort(np.isin(order, seen), kind="stable")]
        left = order[~np.isin(order, drawn)]
        missing = _share(own, fraction) - (len(own) - len(left))
        drawn = np.concatenate([drawn, left[: max(0, missing)]])
        seen = np.concatenate([seen, own])
    return drawn
