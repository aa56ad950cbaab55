"""Data larger than memory: rows are read, tokenised and shuffled a buffer at a time.

A buffer is a small epoch: the plan that deals out data in memory deals out a buffer too, and what does not
fill an optimiser step goes first in the next. The place in the stream is a few counts, so that a
resumed run goes on with the very next row, whatever the number of worker processes.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lit_ft.data.batching import BatchPlan, MicroBatch, deal_of, lay_out, micro_batches, position_under
from lit_ft.data.encoding import Part, PlacedRow, encode_batches
from lit_ft.data.mixing import Mixing
from lit_ft.data.preparing import BAD_ROWS_NAMED, ROWS_PER_BATCH, Preparation
from lit_ft.data.samples import Samples, TokenArrays, collect
from lit_ft.data.sources import Source
from lit_ft.errors import RecipeError
from lit_ft.rows import Row

Tokens = tuple[int, np.ndarray, np.ndarray]
"""A sample: the number of its source, ids, labels."""


class MixedRows(Iterator[PlacedRow]):
    """Rows of several sources in the proportions of a mixing; its place is a list of counts."""

    def __init__(self, sources: Sequence[Source], mixing: Mixing, place: dict[str, list[int]] | None = None) -> None:
        """Open the sources.

        Args:
            sources: what is read.
            mixing: in which proportions; without weights, equal shares.
            place: as ``place`` gave it, to go on from there.
        """
        self.sources, self.mixing = sources, mixing
        self._ended = False
        start = place or {name: [0] * len(sources) for name in ("drawn", "read", "passes")}
        self._drawn, self._read, self._passes = (list(start[name]) for name in ("drawn", "read", "passes"))
        self._open = [source.rows(read, streaming=True) for source, read in zip(sources, self._read, strict=True)]

    def place(self) -> dict[str, list[int]]:
        """Per source: rows drawn in all, rows read in this pass, passes that are over."""
        return {"drawn": list(self._drawn), "read": list(self._read), "passes": list(self._passes)}

    def __next__(self) -> PlacedRow:
        while not self._ended:
            number = self._choose()
            row = next(self._open[number], None)
            if row is not None:
                self._drawn[number] += 1
                self._read[number] += 1
                return (number, *row)
            if self._read[number] == 0:
                raise RecipeError(f"{self.sources[number].path!r} holds no rows; at least one is needed")
            self._passes[number] += 1
            self._read[number] = 0
            self._ended = self.mixing.strategy == "first_exhausted" or all(self._passes)
            if self.mixing.strategy == "all_exhausted":
                self._open[number] = self.sources[number].rows(streaming=True)
        raise StopIteration

    def _choose(self) -> int:
        if self.mixing.strategy == "concatenate":
            return next(number for number, passes in enumerate(self._passes) if not passes)
        # Whose turn it is when each source's draws are spread evenly.
        weights = self.mixing.weights or (1.0,) * len(self.sources)
        return min(range(len(weights)), key=lambda number: (self._drawn[number] + 0.5) / weights[number])


@dataclass
class _Buffer:
    """What is dealt out together."""

    samples: Samples
    units: list[MicroBatch]
    start: dict[str, Any]
    """The stream's place before it, with the samples left over from the one before."""


class StreamLoader:
    """Iterates one replica's micro-batches of a stream; has no length.

    Every rank reads the whole stream, so that all agree on the order without talking.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        preparation: Preparation,
        plan: BatchPlan,
        *,
        names: tuple[str, ...],
        buffer_rows: int,
        replica: int = 0,
        accumulate: Callable[[], int] = lambda: 1,
        workers: int = 0,
    ) -> None:
        """Prepare the loader.

        Args:
            sources: what is read.
            preparation: how rows become samples.
            plan: how samples are dealt out, with the mixing of the sources.
            names: of the sources with a loss curve.
            buffer_rows: rows that are read and shuffled at a time.
            replica: which share is this rank's.
            accumulate: micro-batches per optimiser step, asked for at each buffer.
            workers: processes that tokenise ahead; 0 does it between two steps.
        """
        self.sources, self.preparation, self.plan = sources, preparation, plan
        self.names, self.buffer_rows, self.replica = names, buffer_rows, replica
        self._accumulate, self._workers = accumulate, workers
        self.seconds_waited = 0.0
        """Time that the training loop has waited for rows."""
        self.notes: Counter[str] = Counter()
        """What was done to the rows that were read, as ``encoding.NOTES`` names it, and how many there were."""
        self._place: dict[str, Any] = {"epoch": 0, "buffer": 0, "position": 0, "rows": None, "left": None}
        self._is_open = False
        self._tokenizations = [preparation.tokenization(source) for source in sources]

    def state_dict(self) -> dict[str, Any]:
        """The place of the micro-batch that trains next.

        Lightning draws one ahead from a loader without length, to know which is the last; that one
        has not been trained on.
        """
        return {**self._place, "deal": deal_of(self.plan, self._accumulate())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved place.

        Raises:
            RecipeError: rows were drawn already.
        """
        place = {name: state[name] for name in self._place} | {"position": self.position_of(state)}
        if self._is_open and place != self._place:
            raise RecipeError(
                "a schedule opened the stream before its place was restored; set trainer.max_epochs to -1"
            )
        self._place = place

    def position_of(self, state: dict[str, Any]) -> int:
        """A saved position within a buffer, in this loader's micro-batches."""
        return position_under(state, self.plan, self._accumulate())

    def __iter__(self) -> Iterator[Row]:
        # From where the last iteration was left: limit_train_batches cuts a stream into parts.
        self._is_open = True
        resume = self._place
        epoch, position = resume["epoch"], resume["position"]
        for number, buffer in enumerate(self._buffers(resume), resume["buffer"]):
            rows = islice(
                micro_batches(buffer.units, buffer.samples, self.plan, self.replica, self._accumulate()), position, None
            )
            for handed_out, piece in enumerate(rows, position):
                self._place = {**buffer.start, "epoch": epoch, "buffer": number, "position": handed_out}
                started = time.perf_counter()
                row = lay_out(piece, buffer.samples)
                self.seconds_waited += time.perf_counter() - started
                yield row
            position = 0
        self._place = {"epoch": epoch + 1, "buffer": 0, "position": 0, "rows": None, "left": None}

    # --- buffers ---------------------------------------------------------------------------------

    def _buffers(self, resume: dict[str, Any]) -> Iterator[_Buffer]:
        left: list[list[Tokens]] = _unpack(resume["left"])
        window = self.plan.micro_batch_size * self.plan.replicas * self._accumulate()
        number = resume["buffer"]
        started = time.perf_counter()
        ending = False
        filled = self._filled(resume["rows"])
        ahead = next(filled, None)
        while ahead is not None:
            (rows, fresh), ahead = ahead, next(filled, None)
            samples = _samples([*(one for unit in left for one in unit), *fresh], self.names, len(self.sources))
            old = sum(map(len, left))
            units = list(_consecutive(map(len, left)))
            if fresh:
                later = samples.take(np.arange(old, len(samples)))
                plan = replace(self.plan, mixing=Mixing())  # the stream is mixed already
                units += [[old + i for i in unit] for unit in plan.units(later, resume["epoch"], number)]
            start = {"rows": rows, "left": _pack(left)}
            ending = ahead is None
            full = len(units) if ending else len(units) // window * window
            left = [[(int(samples.source[i]), *samples[i]) for i in unit] for unit in units[full:]]
            self.seconds_waited += time.perf_counter() - started
            yield _Buffer(samples, units[:full], start)
            started = time.perf_counter()
            number += 1

    def _filled(self, place: dict[str, list[int]] | None) -> Iterator[tuple[dict[str, list[int]], list[Tokens]]]:
        """Each buffer's samples, and the stream's place before it."""
        stream = MixedRows(self.sources, self.plan.mixing, place)
        chunks = -(-self.buffer_rows // ROWS_PER_BATCH)

        def batches() -> Iterator[tuple[Any, list[PlacedRow]]]:
            while True:
                rows, room = stream.place(), self.buffer_rows
                while room and (batch := list(islice(stream, min(ROWS_PER_BATCH, room)))):
                    room -= len(batch)
                    yield (rows, room == 0), batch
                if room:
                    return

        samples: list[Tokens] = []
        rows: dict[str, list[int]] = {}
        for (rows, is_full), places, parts in encode_batches(batches(), self._tokenizations, self._workers, chunks):
            samples += self._in_order(places, parts)
            if is_full:
                yield rows, samples
                samples = []
        if samples:
            yield rows, samples

    def _in_order(self, places: list[str], parts: list[Part]) -> list[Tokens]:
        """A batch's samples in the order of its rows."""
        found: list[tuple[int, Tokens]] = []
        for source, positions, encoded in parts:
            skipped = self.preparation.check([places[i] for i in positions], encoded)
            if skipped and not self.notes["skipped"]:
                named = "; ".join(skipped[:BAD_ROWS_NAMED])
                rank_zero_info(f"rows that cannot be used are skipped (data.on_bad_row=skip): {named}")
            self.notes += encoded.notes + Counter(skipped=len(skipped), rows=encoded.count)
            ends = np.cumsum(encoded.lengths)
            for row, end, length in zip(encoded.rows, ends, encoded.lengths, strict=True):
                span = slice(end - length, end)
                found.append((int(positions[row]), (source, encoded.ids[span], encoded.labels[span])))
        return [tokens for _, tokens in sorted(found, key=lambda pair: pair[0])]

    def describe(self) -> list[str]:
        """A line for each thing that was done to the rows that were read."""
        rows = self.notes["rows"]
        lines = self._tokenizations[0].describe(self.notes, rows)
        if self.notes["skipped"]:
            lines.append(f"{self.notes['skipped']:,} of {rows:,} rows cannot be used and were skipped")
        return [f"the stream: {line}" for line in lines]


def _samples(tokens: Sequence[Tokens], names: tuple[str, ...], sources: int) -> Samples:
    source = np.array([number for number, _, _ in tokens], dtype=np.int64)
    parts: list[TokenArrays] = []
    index = np.zeros(len(tokens), dtype=np.int64)
    for number in range(sources):
        mine = [(ids, labels) for which, ids, labels in tokens if which == number]
        index[source == number] = np.arange(len(mine))
        empty = [np.zeros(0, dtype=np.int32)]
        lengths = np.array([len(ids) for ids, _ in mine], dtype=np.int64)
        ids, labels = (np.concatenate([pair[k] for pair in mine] or empty) for k in (0, 1))
        parts.append(collect(ids, labels, lengths))
    return Samples(parts, names, source, index)


def _consecutive(sizes: Iterator[int]) -> Iterator[list[int]]:
    start = 0
    for size in sizes:
        yield list(range(start, start + size))
        start += size


def _pack(units: list[list[Tokens]]) -> dict[str, Any]:
    """Units as tensors and lists, which a checkpoint holds."""
    samples = [tokens for unit in units for tokens in unit]
    return {
        "units": [len(unit) for unit in units],
        "sources": [source for source, _, _ in samples],
        "ids": [torch.from_numpy(np.array(ids)) for _, ids, _ in samples],
        "labels": [torch.from_numpy(np.array(labels)) for _, _, labels in samples],
    }


def _unpack(packed: dict[str, Any] | None) -> list[list[Tokens]]:
    if packed is None:
        return []
    samples = [
        (source, ids.numpy(), labels.numpy())
        for source, ids, labels in zip(packed["sources"], packed["ids"], packed["labels"], strict=True)
    ]
    return [[samples[i] for i in unit] for unit in _consecutive(iter(packed["units"]))]
