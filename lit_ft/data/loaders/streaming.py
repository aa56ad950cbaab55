"""Streaming of data larger than memory: rows are read, tokenized and shuffled one buffer at a time.

A buffer is a small epoch: the ``BatchPlan`` that distributes data in memory distributes a buffer too, and units that
do not fill an optimizer step come first in the next buffer. The position in the stream is a few counts, so that a
resumed run continues with the next row, for any number of worker processes. A *window* is the micro-batches of one
optimizer step.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lit_callbacks.output.quantities import as_count

from lit_ft.data.loaders.batching import (
    BatchPlan,
    Unit,
    batch_geometry,
    build_packed_batch,
    micro_batches,
    position_under,
)
from lit_ft.data.loaders.mixing import Mixing
from lit_ft.data.text.sources import Source
from lit_ft.data.tokens.preparation import BAD_ROWS_NAMED, ROWS_PER_BATCH, Preparation
from lit_ft.data.tokens.samples import Samples, TokenArrays, collect
from lit_ft.data.tokens.tokenization import Part, PlacedRow, encode_batches
from lit_ft.errors import RecipeError
from lit_ft.packed_batch import PackedBatch
from lit_ft.protocols import LoaderState

WINDOWS_KEPT = 3
"""Saved positions of window starts: that of the step in progress, and of the steps that were drawn ahead."""

Tokens = tuple[int, np.ndarray, np.ndarray]
"""A sample: the number of its source, its ids and its labels."""


class MixedRows(Iterator[PlacedRow]):
    """Iterator over the rows of several sources in the proportions of a mixing; its position is a list of counts."""

    def __init__(self, sources: Sequence[Source], mixing: Mixing, position: dict[str, list[int]] | None = None) -> None:
        """Open the sources.

        Args:
            sources: data sets to read.
            mixing: proportions of the sources; without weights (of a single source), equal shares.
            position: saved result of ``position``, to continue from; None starts at the first rows.
        """
        self.sources, self.mixing = sources, mixing
        self._ended = False
        start = position or {name: [0] * len(sources) for name in ("drawn", "read", "passes")}
        self._drawn, self._read, self._passes = (list(start[name]) for name in ("drawn", "read", "passes"))
        # A pass that began before the position is not read in full here.
        self._not_full = [passes + (read > 0) for passes, read in zip(self._passes, self._read, strict=True)]
        self._open = [source.rows(read, streaming=True) for source, read in zip(sources, self._read, strict=True)]

    def position(self) -> dict[str, list[int]]:
        """Position: for each source, rows drawn in total, rows read in this pass, and completed passes."""
        return {"drawn": list(self._drawn), "read": list(self._read), "passes": list(self._passes)}

    def full_passes(self) -> list[int]:
        """Number of passes of each source that were read here from the first row to the last."""
        return [max(passes - before, 0) for passes, before in zip(self._passes, self._not_full, strict=True)]

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
        # The source that is due next when each source's draws are spread evenly.
        weights = self.mixing.weights or (1.0,) * len(self.sources)
        return min(range(len(weights)), key=lambda number: (self._drawn[number] + 0.5) / weights[number])


@dataclass
class _Buffer:
    """Samples that are shuffled and distributed together."""

    samples: Samples
    units: list[Unit]
    start: LoaderState
    """Position of the stream before the buffer, with the samples left over from the buffer before."""


def start_of_pass(epoch: int) -> LoaderState:
    """Position of the first micro-batch of a pass over all rows.

    ``skip`` counts units of the buffer that were used before the split of an optimizer step changed; ``position``
    counts micro-batches after them, and ``batch`` micro-batches of the trainer's epoch.
    """
    return {"epoch": epoch, "buffer": 0, "skip": 0, "position": 0, "batch": 0, "rows": None, "left": None}


class StreamLoader:
    """Dataloader of one replica's micro-batches of a stream; it has no length.

    Every rank reads the full stream, so that all agree on the order without communication.
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
        epoch_batches: int | None = None,
        repeats: bool = False,
        workers: int = 0,
    ) -> None:
        """Prepare the loader.

        Args:
            sources: data sets to read.
            preparation: settings that turn rows into samples.
            plan: distribution of samples to micro-batches and ranks, with the mixing of the sources.
            names: names of the sources' loss curves; empty where there is one source.
            buffer_rows: number of rows that are read and shuffled at a time.
            replica: data-parallel rank of this process.
            accumulate: returns the micro-batches per optimizer step; called at the start of each epoch.
            epoch_batches: micro-batches after which the trainer ends an epoch; None if it ends with the rows.
            repeats: start each epoch at the first row, as ``overfit_batches`` does.
            workers: number of processes that tokenize ahead; 0 tokenizes between two steps.
        """
        self.sources, self.preparation, self.plan = sources, preparation, plan
        self.names, self.buffer_rows, self.replica = names, buffer_rows, replica
        self._accumulate, self._epoch_batches = accumulate, epoch_batches
        self._repeats, self._workers = repeats, workers
        self.notes: list[Counter[str]] = [Counter() for _ in sources]
        """For each source, counts by the names of ``tokenization.NOTES``, and of rows read and skipped, and samples."""
        self._first_bad: dict[int, str] = {}
        """First row of each source that cannot be used, with its location and the problem."""
        self._state: LoaderState = start_of_pass(0)
        self._geometry: dict[str, int] = {}
        self._batch = 0
        self._is_over = False
        self._windows: deque[LoaderState] = deque(maxlen=WINDOWS_KEPT)
        self._resume: LoaderState | None = None
        self._is_open = False
        self._tokenizations = [preparation.tokenization(source) for source in sources]
        self._stamps = [source.stamps() for source in sources]

    def state_dict(self) -> LoaderState:
        """Positions of the micro-batch that trains next, and of the starts of the last windows.

        Lightning draws one micro-batch ahead from a loader without length, to know which is the last; that one
        has not been trained on.
        """
        if self._resume is not None:
            return self._resume
        geometry = self._geometry or batch_geometry(self.plan, self._accumulate())
        windows = list(self._windows)
        return {
            **self._state,
            "batches": self._epoch_batches,
            "is_over": self._is_over,
            "windows": windows,
            "deal": geometry,
        }

    def load_state_dict(self, state: LoaderState) -> None:
        """Continue from a saved position at the next iteration.

        Raises:
            RecipeError: rows were drawn already.
        """
        if self._is_open and any(state[name] != self._state[name] for name in ("epoch", "buffer", "position")):
            raise RecipeError(
                "a schedule opened the stream before its position was restored; set trainer.max_epochs to -1"
            )
        self._resume = state

    @staticmethod
    def rewind(state: LoaderState, micro_batch: int, ready: int) -> None:
        """Set a saved position back to the first micro-batch of an optimizer step, as ``PackedBatchLoader.rewind``."""
        begun = [window for window in state["windows"] if window["batch"] <= micro_batch]
        if begun:
            state |= begun[-1]
            state["position"] += micro_batch - state["batch"]
        state |= {"batch": micro_batch, "is_over": False}

    @staticmethod
    def restart_epoch(state: LoaderState) -> None:
        """Set a saved position to the beginning of its pass over all rows."""
        state |= start_of_pass(state["epoch"])

    def __iter__(self) -> Iterator[PackedBatch]:
        # Continues where the last iteration stopped: limit_train_batches splits a stream into parts.
        self._is_open = True
        resume, self._resume = self._resume, None
        now = batch_geometry(self.plan, self._accumulate())
        if resume is not None:
            state = self._rescaled(resume, resume["deal"], now)
            # As it was saved: this run may have other micro-batches and another limit. Its trainer begins a new epoch.
            has_ended = resume["batch"] == resume["batches"]
        else:
            state, has_ended = self._rescaled(self._state, self._geometry, now), True
        self._batch = 0 if has_ended else state["batch"]
        if self._repeats and self._batch == 0:
            state = start_of_pass(0)
        self._geometry, self._is_over = now, False
        self._windows.clear()
        yield from self._one_pass(state)
        if self._batch == 0:  # the previous part ended together with its pass
            yield from self._one_pass(self._state)
        self._is_over = True

    def _rescaled(self, state: LoaderState, then: dict[str, int] | None, now: dict[str, int]) -> LoaderState:
        """Convert a position between optimizer steps to another ``batch_geometry``; it stays without ``then``."""
        state = {name: state[name] for name in start_of_pass(0)}
        if not then or then == now:
            return state
        if state["position"] % then["accumulate"]:
            position_under({**state, "deal": then}, self.plan, now["accumulate"])  # raises the error
        taken, trained = (state[name] * then["units"] for name in ("position", "batch"))
        return {**state, "skip": state["skip"] + taken, "position": 0, "batch": trained // now["units"]}

    def _one_pass(self, start: LoaderState) -> Iterator[PackedBatch]:
        """Micro-batches of the rest of a pass over all rows."""
        position, accumulate = start["position"], self._geometry["accumulate"]
        for number, buffer in enumerate(self._buffers(start), start["buffer"]):
            pieces = micro_batches(
                buffer.units,
                buffer.samples,
                self.plan,
                self.replica,
                accumulate,
                fill_last_window=self._epoch_batches is not None,
                skip=position,
            )
            for at, piece in enumerate(pieces, position):
                state = {**buffer.start, "epoch": start["epoch"], "buffer": number, "position": at}
                state["batch"] = self._batch
                if at % accumulate == 0:
                    self._windows.append(state)
                batch = build_packed_batch(piece, buffer.samples)
                self._batch += 1
                # The trainer draws one micro-batch ahead unless it knows where the epoch ends.
                self._state = (
                    state if self._epoch_batches is None else {**state, "position": at + 1, "batch": self._batch}
                )
                yield batch
            position = 0
        self._state = start_of_pass(start["epoch"] + 1)

    # --- buffers ---------------------------------------------------------------------------------

    def _buffers(self, resume: LoaderState) -> Iterator[_Buffer]:
        left: list[list[Tokens]] = _unpack(resume["left"])
        window = self.plan.micro_batch_size * self.plan.replicas * self._geometry["accumulate"]
        number, skip = resume["buffer"], resume["skip"]
        ending = False
        filled = self._filled(resume["rows"])
        ahead = next(filled, None)
        while ahead is not None:
            (rows, fresh), ahead = ahead, next(filled, None)
            samples = _samples([*(one for unit in left for one in unit), *fresh], self.names, len(self.sources))
            old = sum(map(len, left))
            units: list[Unit] = [*_consecutive(map(len, left))]
            if fresh:
                later = samples.take(np.arange(old, len(samples)))
                plan = replace(self.plan, mixing=Mixing(), keeps_beginnings=False)  # the stream is mixed already
                units += [[old + i for i in unit] for unit in plan.units(later, resume["epoch"], number)]
            start = {"rows": rows, "left": _pack(left), "skip": skip}
            ending = ahead is None
            full = len(units) if ending else skip + (len(units) - skip) // window * window
            left = [[(int(samples.source[i]), *samples[i]) for i in unit] for unit in units[full:]]
            yield _Buffer(samples, units[skip:full], start)
            number, skip = number + 1, 0

    def _filled(self, position: dict[str, list[int]] | None) -> Iterator[tuple[dict[str, list[int]], list[Tokens]]]:
        """Samples of each buffer, and the position of the stream before it."""
        stream = MixedRows(self.sources, self.plan.mixing, position)
        chunks = -(-self.buffer_rows // ROWS_PER_BATCH)

        def batches() -> Iterator[tuple[tuple[dict[str, list[int]], bool, list[int]], list[PlacedRow]]]:
            while True:
                rows, room = stream.position(), self.buffer_rows
                while room and (batch := list(islice(stream, min(ROWS_PER_BATCH, room)))):
                    room -= len(batch)
                    yield (rows, room == 0, stream.full_passes()), batch
                self._check_unchanged()
                if room:
                    return

        samples: list[Tokens] = []
        rows: dict[str, list[int]] = {}
        for tag, locations, parts in encode_batches(batches(), self._tokenizations, self._workers, chunks):
            rows, is_full, full_passes = tag
            samples += self._in_order(locations, parts)
            self._check_sources(full_passes)
            if is_full:
                yield rows, samples
                samples = []
        self._check_sources(stream.full_passes())
        if samples:
            yield rows, samples

    def _check_sources(self, full_passes: list[int]) -> None:
        """Refuse a source that has given no sample, though all of its rows were read: it never gives one."""
        for number, (source, notes) in enumerate(zip(self.sources, self.notes, strict=True)):
            if full_passes[number] and not notes["samples"]:
                bad = [first] if (first := self._first_bad.get(number)) else []
                lines = self._describe(number)
                self.preparation.refuse_without_samples(source, notes["rows"], bad, notes["skipped"], lines)

    def _check_unchanged(self) -> None:
        """Refuse files that are others than when the stream was opened: its position stands for other rows then."""
        for source, then in zip(self.sources, self._stamps, strict=True):
            now = source.stamps()
            if changed := [file for file in {**then, **now} if then.get(file) != now.get(file)]:
                raise RecipeError(
                    f"{source.path}: {as_count(len(changed), 'file')} changed, came or vanished while the run reads "
                    f"them, e.g. {changed[0]}; put the data back and resume with --ckpt_path last, or resume on the "
                    "present data with --resume_data changed"
                )

    def _in_order(self, locations: list[str], parts: list[Part]) -> list[Tokens]:
        """Samples of a batch of rows, in the order of the rows."""
        numbered: list[tuple[int, Tokens]] = []
        for source, positions, encoded in parts:
            skipped = self.preparation.check([locations[i] for i in positions], encoded)
            notes = self.notes[source]
            if skipped and not notes["skipped"]:
                self._first_bad[source] = skipped[0]
                named = "; ".join(skipped[:BAD_ROWS_NAMED])
                rank_zero_info(f"rows that cannot be used are skipped (data.on_bad_row=skip): {named}")
            notes.update(encoded.notes)
            notes.update(skipped=len(skipped), rows=encoded.count, samples=len(encoded.lengths))
            ends = np.cumsum(encoded.lengths)
            for row, end, length in zip(encoded.rows, ends, encoded.lengths, strict=True):
                span = slice(end - length, end)
                numbered.append((int(positions[row]), (source, encoded.ids[span], encoded.labels[span])))
        return [tokens for _, tokens in sorted(numbered, key=lambda pair: pair[0])]

    def describe(self) -> list[str]:
        """Messages that count truncated, dropped, skipped and otherwise changed rows of each source, one line each."""
        return [line for number in range(len(self.sources)) for line in self._describe(number)]

    def _describe(self, number: int) -> list[str]:
        notes = self.notes[number]
        rows = notes["rows"]
        lines = self._tokenizations[number].describe(notes, rows)
        if notes["skipped"]:
            lines.append(f"{notes['skipped']:,} of {as_count(rows, 'row')} cannot be used, skipped")
        return [f"the stream of {self.sources[number].path}: {line}" for line in lines]


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


def _pack(units: list[list[Tokens]]) -> LoaderState:
    """Convert units to tensors and lists, which a checkpoint can hold."""
    samples = [tokens for unit in units for tokens in unit]
    return {
        "units": [len(unit) for unit in units],
        "sources": [source for source, _, _ in samples],
        "ids": [torch.from_numpy(np.array(ids)) for _, ids, _ in samples],
        "labels": [torch.from_numpy(np.array(labels)) for _, _, labels in samples],
    }


def _unpack(packed: LoaderState | None) -> list[list[Tokens]]:
    if packed is None:
        return []
    samples = [
        (source, ids.numpy(), labels.numpy())
        for source, ids, labels in zip(packed["sources"], packed["ids"], packed["labels"], strict=True)
    ]
    return [[samples[i] for i in unit] for unit in _consecutive(iter(packed["units"]))]
