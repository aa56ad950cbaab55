"""Preparation of one source for training: reading, checks, tokenization, caching, and messages about changed rows."""

import json
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lit_callbacks.output.quantities import as_count
from transformers import PreTrainedTokenizerBase

from lit_ft import process
from lit_ft.data.text.formats import OF_PAIRS, columns_of, find_format, find_format_of_question, renamed
from lit_ft.data.text.rendering import Supervise
from lit_ft.data.text.sources import RawRow, Source
from lit_ft.data.tokens import cache as token_cache
from lit_ft.data.tokens.megatron_indexed import read_documents
from lit_ft.data.tokens.row_count import RowCount
from lit_ft.data.tokens.samples import ARRAYS, CHOSEN, ArrayFiles, TokenArrays, collect, read_arrays
from lit_ft.data.tokens.segment_encoder import TextEncoder
from lit_ft.data.tokens.tokenization import Tokenization, encode_batches
from lit_ft.data.tokens.truncation import Encoded, Overlong
from lit_ft.errors import BadRow, RecipeError
from lit_ft.process import available_cores

OnBadRow = Literal["error", "skip"]

ROWS_PER_BATCH = 500
"""Number of rows that a process tokenizes at a time."""
MAY_BE_SKIPPED = " (data.on_bad_row=skip leaves such rows out, and counts them)"
"""Advice for a row that cannot be used, which commands without this option replace."""
FULL_LENGTHS = "full_lengths"
"""Array of a cache entry with ``Prepared.full_lengths``."""
BAD_ROWS_NAMED = 5
"""Number of skipped rows that are named in a message; all are counted."""


@dataclass(frozen=True)
class Prepared:
    """Samples of a source, and a record of what was done to its rows."""

    source: Source
    arrays: TokenArrays
    rows: int
    """Number of rows that were read."""
    full_lengths: np.ndarray
    """Tokens of each sample before ``max_length`` was applied, ``(samples before it,)``, int64."""
    notes: Counter[str] = field(default_factory=Counter)
    """Counts by the names of ``tokenization.NOTES``."""
    bad: list[str] = field(default_factory=list)
    """First skipped rows, each with its location and the problem."""
    bad_rows: int = 0
    lines: list[str] = field(default_factory=list)
    """Messages for the user."""


@dataclass(frozen=True)
class Preparation:
    """Options that decide how the rows of a source become samples."""

    tokenizer: PreTrainedTokenizerBase
    """Tokenizer of the model; None until ``TextDataModule.load`` is given it."""
    system: str | None = None
    supervise: Supervise = "assistant"
    max_length: int | None = None
    overlong: Overlong = "truncate"
    template_options: dict[str, object] | None = None
    on_bad_row: OnBadRow = "error"
    cache_dir: str | None = None
    workers: int | None = None
    """Number of processes that tokenize; None is one per CPU core for files of over 5 MB, else this process."""
    takes_questions: bool = False
    """Whether rows may lack their answer."""
    keeps_ending: bool = False
    """Whether conversations end as the chat template ends them."""

    @property
    def of_conversations(self) -> dict[str, str]:
        """Options that are given and change conversations alone, by their names."""
        supervise = None if self.supervise == "assistant" else self.supervise
        return {name: value for name, value in (("system", self.system), ("supervise", supervise)) if value}

    def tokenization(self, source: Source) -> Tokenization:
        """Build the tokenization of a source; its format may be found from its first row.

        Raises:
            RecipeError: the source has no row, or its first row fits no format.
        """
        return Tokenization(
            tokenizer=self.tokenizer,
            format=self._format(source),
            columns=source.columns,
            system=self.system if source.system is None else source.system,
            supervise=self.supervise,
            max_length=self.max_length,
            overlong=self.overlong,
            template_options=self.template_options,
            takes_questions=self.takes_questions,
            keeps_ending=self.keeps_ending,
        )

    def _format(self, source: Source) -> str:
        if source.format != "auto" and not source.columns:
            return source.format
        first_bad = ""
        for location, row in source.rows(streaming=True):  # no copy of a hub data set for the first row
            if isinstance(row, BadRow):
                self.refuse(location, row)
                first_bad = first_bad or f"; {location}: {row}"
                continue
            if missing := self._missing_columns(source, row):
                names = ", ".join(map(repr, row))
                raise RecipeError(
                    f"{location}: columns names {missing[0]!r}, but the row's are {names or 'none'}, and none of the "
                    f"first {ROWS_PER_BATCH} rows has it; fix it"
                )
            try:
                find = find_format_of_question if self.takes_questions else find_format
                form = source.format if source.format != "auto" else find(renamed(row, source.columns))
            except BadRow as error:
                raise RecipeError(f"{location}: {error}") from error
            if unknown := [name for name in source.columns or {} if name not in columns_of(form)]:
                raise RecipeError(
                    f"{source.path}: columns maps {unknown[0]!r}, which is no column of the format {form}; its columns "
                    f"are {', '.join(columns_of(form))}"
                )
            return form
        raise RecipeError(f"{source.path!r} holds no row that can be read; at least one is needed{first_bad}")

    def _missing_columns(self, source: Source, first: RawRow) -> list[str]:
        """Columns that a source maps and none of its first rows has; a row may lack what is optional, or null."""
        missing = [name for name in (source.columns or {}).values() if name not in first]
        for _, row in islice(source.rows(streaming=True), ROWS_PER_BATCH) if missing else ():
            missing = [name for name in missing if isinstance(row, BadRow) or name not in row]
        return missing

    def refuse(self, location: str, message: object) -> None:
        """Raise for a row that cannot be used, unless such rows are skipped.

        Raises:
            RecipeError: ``on_bad_row`` is ``error``.
        """
        if self.on_bad_row == "error":
            raise RecipeError(f"{location}: {message}{MAY_BE_SKIPPED}")

    def check(self, locations: list[str], encoded: Encoded) -> list[str]:
        """Problems of the rows that cannot be used, each with its location.

        Raises:
            RecipeError: such rows exist and are not skipped, or a row is too long and ``overlong`` is ``error``.
        """
        if encoded.too_long:
            row, tokens = encoded.too_long[0]
            raise RecipeError(
                f"{locations[row]}: {tokens} tokens are over data.max_length={self.max_length} "
                f"({len(encoded.too_long)} such rows among these {encoded.count}); raise it, or set data.overlong "
                "to truncate, truncate_left_prompt or drop"
            )
        for row, message in encoded.bad:
            self.refuse(locations[row], message)
        return [f"{locations[row]}: {message}" for row, message in encoded.bad]

    def prepare(self, source: Source) -> Prepared:
        """Read and tokenize a source, or map its entry in the token cache.

        Raises:
            RecipeError: a file cannot be read, a row cannot be used, or no sample is left.
        """
        if source.index_prefix is not None:
            return self._map_indexed(source, source.index_prefix)
        tokenization, content = self.tokenization(source), source.digest()
        key = token_cache.fingerprint(
            content,
            tokenization,
            reading=[source.split, source.subset, source.max_rows, source.document, source.format],
        )
        folder = Path(self.cache_dir).expanduser() if self.cache_dir else token_cache.default_folder()

        def write(folder_of_entry: Path) -> None:
            self._tokenize(source, tokenization, folder_of_entry)
            if source.digest() != content:
                raise RecipeError(
                    f"{source.path}: has changed while it was tokenized; start again when nothing writes to it"
                )

        folder_of_entry = token_cache.entry(folder / "tokens", key, write)
        meta = json.loads((folder_of_entry / "meta.json").read_text(encoding="utf-8"))
        prepared = Prepared(
            source,
            read_arrays(folder_of_entry),
            meta["rows"],
            np.load(folder_of_entry / f"{FULL_LENGTHS}.npy", mmap_mode="r"),
            Counter(meta["notes"]),
            meta["bad"],
            meta["bad_rows"],
        )
        if prepared.bad and self.on_bad_row == "error":  # skipped by the run that wrote the entry
            raise RecipeError(f"{prepared.bad[0]}{MAY_BE_SKIPPED}")
        prepared.lines.extend(self.describe(prepared, tokenization))
        self._check_left(prepared)
        return prepared

    def try_out(self, source: Source) -> None:
        """Check a streamed source by its first rows.

        Raises:
            RecipeError: a file cannot be read, a row cannot be used, or these are all rows and give no sample.
        """
        tokenization = self.tokenization(source)
        if left := source.left_out():
            rank_zero_info(f"{source.path}: {left}")
        rows = source.rows(streaming=True)
        head = list(islice(rows, ROWS_PER_BATCH))
        encoded = tokenization.encode([row for _, row in head])
        bad = self.check([location for location, _ in head], encoded)
        if len(encoded.lengths) == 0 and next(rows, None) is None:
            lines = [f"{source.path}: {line}" for line in tokenization.describe(encoded.notes, encoded.count)]
            self.refuse_without_samples(source, encoded.count, bad, len(bad), lines)

    def _tokenize(self, source: Source, tokenization: Tokenization, folder: Path) -> None:
        rows = bad_rows = tokens = 0
        bad: list[str] = []
        notes: Counter[str] = Counter()
        stream = ((0, where, row) for where, row in source.rows())
        chunks = iter(lambda: (None, list(islice(stream, ROWS_PER_BATCH))), (None, []))
        parts = encode_batches(chunks, [tokenization], self._workers(source))
        of_pairs = [CHOSEN] if tokenization.format in OF_PAIRS else []
        files = closing(ArrayFiles(folder, (*ARRAYS, FULL_LENGTHS, *of_pairs)))
        with process.held_signals() as stop, files as arrays, RowCount(source.path) as count, closing(parts):  # type: ignore[type-var]
            for _, locations, ((_, _, encoded),) in parts:
                stop()
                bad += self.check(locations, encoded)
                bad, bad_rows = bad[:BAD_ROWS_NAMED], bad_rows + len(encoded.bad)
                part = collect(encoded.ids, encoded.labels, encoded.lengths, rows + encoded.rows, encoded.chosen)
                arrays.add(ids=part.ids, labels=part.labels, offsets=tokens + part.offsets, rows=part.rows)
                arrays.add(supervised=part.supervised, full_lengths=encoded.full_lengths)
                arrays.add(**{CHOSEN: part.chosen} if part.chosen is not None else {})
                notes += encoded.notes
                rows, tokens = rows + encoded.count, tokens + len(part.ids)
                count.add(encoded.count)
        if not rows:
            raise RecipeError(f"{source.path!r} holds no rows; at least one is needed")
        meta = {"rows": rows, "notes": notes, "bad": bad, "bad_rows": bad_rows}
        (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")

    def _workers(self, source: Source) -> int:
        if self.workers is not None:
            return self.workers
        # Starting processes costs more than a small data set.
        return available_cores() if sum(file.stat().st_size for file in source.content()) > 5_000_000 else 0

    def describe(self, prepared: Prepared, tokenization: Tokenization, besides: Collection[str] = ()) -> list[str]:
        """Messages about what was done to the rows of a source, without those of ``besides``: notes, and bad rows."""
        notes = Counter({name: count for name, count in prepared.notes.items() if name not in besides})
        lines = [left] if (left := prepared.source.left_out()) else []
        lines += tokenization.describe(notes, prepared.rows)
        if prepared.bad_rows and "bad rows" not in besides:
            lines.append(describe_bad_rows(prepared.bad, prepared.bad_rows, prepared.rows))
        return [f"{prepared.source.path}: {line}" for line in lines]

    def _check_left(self, prepared: Prepared) -> None:
        if len(prepared.arrays) == 0:
            self.refuse_without_samples(prepared.source, prepared.rows, prepared.bad, prepared.bad_rows, prepared.lines)

    def refuse_without_samples(
        self, source: Source, rows: int, bad: Sequence[str], bad_rows: int, lines: Sequence[str]
    ) -> None:
        """Raise for a source of which nothing can be trained on.

        Args:
            source: the source.
            rows: number of rows that were read.
            bad: first rows that cannot be used, each with its location and the problem.
            bad_rows: number of all rows that cannot be used.
            lines: messages about what was done to the others.

        Raises:
            RecipeError: always.
        """
        read = as_count(rows, "row")
        if bad_rows == rows:
            raise RecipeError(f"{source.path}: not one of {read} can be used, e.g. {bad[0]}")
        raise RecipeError(
            f"{source.path}: not one of {read} has a supervised token within data.max_length={self.max_length}; "
            f"{'; '.join(lines) or 'no row has anything to learn from'}"
        )

    def _map_indexed(self, source: Source, prefix: Path) -> Prepared:
        ids, spans = read_documents(prefix)
        spans = spans[: source.max_rows]
        rows = np.arange(len(spans))
        if len(spans) == 0:
            raise RecipeError(f"{source.path!r} holds no documents; at least one is needed")
        last = TextEncoder(self.tokenizer).vocabulary - 1
        seen = ids[int(spans[:, 0].min()) : int(spans[:, 1].max())]
        smallest, largest = int(seen.min()), int(seen.max())
        if smallest < 0 or largest > last:
            strange = smallest if smallest < 0 else largest
            raise RecipeError(
                f"{source.path}: holds the token id {strange}, those of the tokenizer are 0 to {last}; set "
                "model.tokenizer to the one that wrote it"
            )
        lines = []
        tokens = spans[:, 1] - spans[:, 0]
        if self.max_length is not None and (tokens > self.max_length).any():
            count = int((tokens > self.max_length).sum())
            of = as_count(len(tokens), "document")
            say = f"{count:,} of {of}: longer than data.max_length={self.max_length} tokens"
            if self.overlong == "error":
                raise RecipeError(f"{source.path}: {say}; raise it, or set data.overlong to truncate (they are split)")
            if self.overlong == "drop":
                rows, spans = rows[tokens <= self.max_length], spans[tokens <= self.max_length]
            else:
                rows, spans = _in_pieces(spans, self.max_length)
            deed = "dropped" if self.overlong == "drop" else "goes on in further samples"
            lines = [f"{source.path}: {say} and {deed}"]
        kept = spans[:, 1] - spans[:, 0] > 1  # one token predicts nothing
        spans, rows = spans[kept], rows[kept]
        arrays = TokenArrays(ids, ids, spans, rows, spans[:, 1] - spans[:, 0] - 1)
        prepared = Prepared(source, arrays, len(tokens), tokens, lines=lines)
        self._check_left(prepared)
        return prepared


def _in_pieces(spans: np.ndarray, max_length: int) -> tuple[np.ndarray, np.ndarray]:
    """Split spans into pieces of up to ``max_length`` tokens; return the row of each piece, and the pieces.

    Each piece begins with the last token of the piece before: a sample's first token is never a target.
    """
    step = max(max_length - 1, 1)
    counts = np.maximum(-(-(spans[:, 1] - spans[:, 0] - 1) // step), 1)
    rows = np.repeat(np.arange(len(spans)), counts)
    within = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    begins = spans[rows, 0] + within * step
    return rows, np.stack([begins, np.minimum(begins + max_length, spans[rows, 1])], axis=1)


def describe_bad_rows(bad: Sequence[str], count: int, rows: int) -> str:
    """Message that some rows cannot be used, of which the problems of the first are given."""
    more = ", ..." if count > len(bad[:BAD_ROWS_NAMED]) else ""
    named = "; ".join(bad[:BAD_ROWS_NAMED])
    return f"{count:,} of {as_count(rows, 'row')} cannot be used, skipped (data.on_bad_row=skip): {named}{more}"
