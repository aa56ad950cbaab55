"""Readers of data sources: files, folders, globs, saved data sets and the hub, read lazily, row by row.

JSON, CSV and text are read here, so that an error names the file and the line and no value changes its
type; the ``datasets`` library reads Parquet, saved data sets and the hub.
"""

import csv
import gzip
import hashlib
import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from glob import escape, glob, has_magic
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, Optional

from lit_callbacks.output.printable import printable

from lit_ft.data.text.json_list import LONGEST_ROW_BYTES, ROW_DECODER, TO_UTF_8, items_of_list
from lit_ft.data.text.json_object import refuse_one_object
from lit_ft.errors import BadRow, RecipeError, check_types, explained
from lit_ft.internals.hub import remedy, use_the_cache_without_a_network
from lit_ft.model.files.git_pointer import refuse_pointer

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

RawRow = dict[str, Any]
"""Row of a data set as it was read, by column."""
FormatName = Literal[
    "auto",
    "alpaca",
    "sharegpt",
    "messages",
    "completion",
    "prompt_completion",
    "tokenized",
    "indexed",
    "preference",
    "unpaired_preference",
]

TEXT_FILES = (".json", ".jsonl", ".csv", ".tsv", ".txt", ".md")
"""Suffixes of the files that are read here; each may be followed by .gz."""
DEEPEST = 100
"""Maximum nesting of lists and objects; deeper ones break templates and process pools."""
_NO_DATA = ("readme", "license", "dataset_infos")
"""Names, in lower case and without suffix, of files that a data folder often has beside its data."""
_SPLIT_WORDS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
"""Words in the names of files and folders that stand for a split, as the `datasets` library reads them."""
_SPLIT_WORD = re.compile(rf"(?<![^\W\d_])(?:{'|'.join(_SPLIT_WORDS)})(?![^\W\d_])")
SUFFIXES = (*TEXT_FILES, *(f"{suffix}.gz" for suffix in TEXT_FILES), ".parquet")


_DEFAULT_SPLIT = "train"


@dataclass(frozen=True)
class Source:
    """One data set of a mixture."""

    path: str
    """File (.json, .jsonl, .csv, .tsv, .txt, .parquet, .bin/.idx), folder or glob of them, saved data set, hub id."""
    name: Optional[str] = None
    """Name of its loss curve; by default the file's name without suffix."""
    format: FormatName = "auto"
    """Format of its rows; auto chooses by the columns of the first row."""
    weight: Optional[float] = None
    """Weight with which samples are drawn from it, relative to the other sources' weights; see data.mixing."""
    max_rows: Optional[int] = None
    """Number of rows to read, from the first on; by default all."""
    split: str = _DEFAULT_SPLIT
    """Split of a hub data set or a saved DatasetDict."""
    subset: Optional[str] = None
    """Subset (configuration) of a hub data set."""
    columns: Optional[dict[str, str]] = None
    """Column names of this data set, by the names that the format needs, e.g. {instruction: question}."""
    system: Optional[str] = None
    """System prompt for rows that have none; data.system by default, and "" for none."""
    document: Literal["line", "file"] = "line"
    """Unit of text that is a row of a .txt or .md file: each line, or the full file."""

    def __post_init__(self) -> None:
        if not isinstance(self.path, str | os.PathLike):
            raise RecipeError(
                f"data.path is of type {type(self.path).__name__}, and the name of a file or a folder is needed; write "
                "the rows to one, e.g. dataset.save_to_disk(FOLDER), and name it"
            )
        object.__setattr__(self, "path", os.fspath(self.path))
        check_types("data.sources", Source, vars(self))
        if not self.path.strip():
            raise RecipeError(f"data.path={self.path!r} names nothing; give a file, a folder, a glob, or a data set")
        if self.max_rows is not None and self.max_rows < 1:
            raise RecipeError(f"{self.path}: max_rows={self.max_rows} must be 1 or more; leave it out for all rows")

    @property
    def title(self) -> str:
        """Name for loss curves and reports, on one line and without control characters."""
        name = self.name or Path(self.path.rstrip("/")).name.split(".")[0].replace("*", "") or "data"
        return printable(name, one_line=True)

    @property
    def index_prefix(self) -> Path | None:
        """Path of the ``.bin`` and ``.idx`` files of an indexed data set, without suffix; None for other sources."""
        path = Path(self.path).expanduser()
        prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
        # False of a name that is too long, which Path's own methods raise.
        is_indexed = self.format == "indexed" or (not os.path.isdir(path) and os.path.isfile(f"{prefix}.idx"))
        return prefix if is_indexed else None

    @property
    def _saved(self) -> Path | None:
        folder = Path(self.path).expanduser()
        is_saved = any((folder / name).is_file() for name in ("state.json", "dataset_dict.json"))
        return folder if is_saved else None

    @property
    def is_on_hub(self) -> bool:
        """Whether the path names a data set on the hub."""
        is_name = self.path.count("/") <= 1 and not self.path.startswith((".", "~", "/")) and not has_magic(self.path)
        return is_name and not _is_data(self.path) and not Path(self.path).exists()

    def files(self) -> list[Path]:
        """Files that hold the rows, sorted by path.

        Raises:
            RecipeError: there are none.
        """
        files, _ = self._found()
        self._check_of_files(files)
        return files

    def left_out(self) -> str:
        """Text on files beside those that hold the rows; empty if there are none."""
        if self._saved is not None or self.is_on_hub or not (left := self._found()[1]):
            return ""
        number = "1 file is not data and was" if len(left) == 1 else f"{len(left):,} files are not data and were"
        return f"{number} left out: {', '.join(left[:5])}"

    def _check_of_files(self, files: Sequence[Path]) -> None:
        """Refuse options that say nothing about files, or not about these."""
        for name, default in (("split", _DEFAULT_SPLIT), ("subset", None)):
            if (value := getattr(self, name)) != default:
                raise RecipeError(
                    f"{self.path}: {name}={value!r} chooses a part of a hub data set, or of a saved one, and these are "
                    "files; leave it out, and name the files that are meant, e.g. with a glob"
                )
        if self.document == "file" and not any({".txt", ".md"} & set(map(str.lower, one.suffixes)) for one in files):
            raise RecipeError(f"{self.path}: document=file is for .txt and .md files, and there is none; leave it out")

    def _found(self) -> tuple[list[Path], list[str]]:
        """Files that hold the rows, and names of those beside them that do not."""
        path = Path(self.path).expanduser()
        if path.is_file():
            if not _is_data(path.name):
                advice = "unpack it first" if _is_data(path.stem) else f"give {', '.join(SUFFIXES)}"
                raise RecipeError(f"{self.path}: {path.suffix or 'no suffix'} is not read; {advice}")
            return [path], []
        if path.is_dir():
            # Of the folders that are links, which rglob does not follow, the links are candidates: they are named.
            found = (file for file in path.rglob("*") if file.is_symlink() or not file.is_dir())
            candidates = sorted(file for file in found if ".cache" not in file.relative_to(path).parts)
            hidden = {file for file in candidates if any(part[0] == "." for part in file.relative_to(path).parts)}
        elif has_magic(self.path):
            candidates = sorted(Path(name) for name in glob(str(path), recursive=True) if not Path(name).is_dir())
            hidden = set()
        else:
            raise RecipeError(f"{self.path!r} {_why_no_file(path) or 'does not exist'}; {_what_to_name(self.path)}")
        files = [
            file
            for file in candidates
            if _is_data(file.name) and file.stem.lower() not in _NO_DATA and file not in hidden
        ]
        if not files:
            raise RecipeError(
                f"{self.path!r} holds no file that can be read ({', '.join(SUFFIXES)}); name another folder"
            )
        if broken := next((file for file in files if not file.is_file()), None):
            raise RecipeError(f"{str(broken)!r} {_why_no_file(broken)}; remove it, or put back the file")
        if path.is_dir():
            _check_one_split(path, files)
        kept = set(files)  # of a list, each search would compare each of thousands of files
        return files, [f"{file.name}{' (a linked folder)' * file.is_dir()}" for file in candidates if file not in kept]

    def stamps(self) -> dict[Path, tuple[int, int]]:
        """Size and time of change (ns) of the files that hold the rows; nothing for a hub data set."""
        files = [] if self.is_on_hub else self.content() if self._saved is not None else self._found()[0]
        return {file: (state.st_size, state.st_mtime_ns) for file in files for state in [file.stat()]}

    def rows(self, skip: int = 0, streaming: bool = False) -> Iterator[tuple[str, RawRow | BadRow]]:
        """Iterate over pairs of a location (file and line, or row number) and a row; ``BadRow`` if it does not parse.

        Args:
            skip: number of rows to leave out at the beginning.
            streaming: read a hub data set over the network, without a copy on disk.

        Raises:
            RecipeError: a file cannot be read at all.
        """
        if self._saved is not None or self.is_on_hub:
            rows: Iterator[tuple[str, RawRow | BadRow]] = _arrow_rows(self.path, self.dataset(streaming))
        else:
            rows = (
                row for file in self.files() for row in _file_rows(file, self.document, self.format == "completion")
            )
        return islice(rows, skip, self.max_rows)

    def dataset(self, streaming: bool = False) -> "Dataset | IterableDataset":
        """Load a saved folder or a hub data set with the ``datasets`` library.

        Raises:
            RecipeError: it cannot be loaded, or lacks the split.
        """
        import datasets

        if self._saved is not None:
            _check_saved(self._saved)
            with explained(f"{self.path}: is no saved data set that loads", "save it again"):
                data = datasets.load_from_disk(str(self._saved))
            if self.subset is not None:
                raise RecipeError(
                    f"{self.path}: subset={self.subset!r} is for hub data sets, not a saved one; leave it out"
                )
            if not isinstance(data, datasets.DatasetDict):
                if self.split not in (_DEFAULT_SPLIT, str(data.split)):
                    raise RecipeError(f"{self.path}: has no split {self.split!r}, but is one data set; leave split out")
                return data
            if self.split not in data:
                raise RecipeError(f"{self.path}: has no split {self.split!r}; its splits are {', '.join(data)}")
            return data[self.split]
        try:
            use_the_cache_without_a_network()
            return datasets.load_dataset(self.path, self.subset, split=self.split, streaming=streaming)
        except Exception as error:  # from a failed name resolution to a wrong name: it cannot be loaded
            why = " ".join(str(error).split("\n")[:2]).strip().rstrip(".:")[:200]  # the second line lists the subsets
            raise RecipeError(
                f"{self.path!r} is no file or folder here (in {os.getcwd()}), and cannot be had from the hub ({why}); "
                + (
                    remedy(f"datasets/{self.path}", error)
                    or "fix the path, or the name, split or subset of the data set"
                )
            ) from error

    def content(self) -> list[Path]:
        """Files whose content decides the rows; for a hub data set, its downloaded files."""
        if self.is_on_hub:
            return [Path(entry["filename"]) for entry in self.dataset().cache_files]
        if self._saved is not None:
            return sorted(file for file in self._saved.rglob("*") if file.is_file() and "cache-" not in file.name)
        return self.files()

    def content_names(self) -> set[str]:
        """Names of what the rows are read from, equal for equal content of two sources: resolved paths of files."""
        if self.is_on_hub:
            return {f"{self.path} (subset {self.subset}, split {self.split})"}
        if self._saved is not None:
            return {f"{self._saved.resolve()} (split {self.split})"}
        if self.index_prefix is not None:
            return {f"{self.index_prefix.resolve()}.bin"}
        return {str(file.resolve()) for file in self.files()}

    def digest(self) -> str:
        """Fingerprint of the rows' content."""
        digest = hashlib.blake2b(digest_size=16)
        for file in self.content():
            digest.update(f"\n{file.name} {file.stat().st_size}\n".encode("utf-8", "surrogateescape"))
            with file.open("rb") as stream:
                while block := stream.read(2**22):
                    digest.update(block)
        return digest.hexdigest()


def _is_data(name: str) -> bool:
    """Whether a file of this name is read as data; other systems write endings in capitals."""
    return name.lower().endswith(SUFFIXES)


def _check_one_split(folder: Path, files: list[Path]) -> None:
    """Refuse a folder that holds the files of several splits by their names, as a downloaded hub data set does."""
    splits: dict[str, tuple[Path, str]] = {}  # by split: its first file, and what names its files alone
    for file in files:
        parts = file.relative_to(folder).parts
        for depth, part in enumerate(parts, 1):
            if word := _SPLIT_WORD.search(part.lower()):
                is_folder = depth < len(parts)
                alone = (
                    folder.joinpath(*parts[:depth]) if is_folder else folder / "**" / f"*{part[slice(*word.span())]}*"
                )
                splits.setdefault(_SPLIT_WORDS[word.group()], (file, str(alone)))
                break
    if len(splits) > 1:
        names = ", ".join(f"{split}: {file.relative_to(folder)}" for split, (file, _) in splits.items())
        _, named = splits.get("train") or next(iter(splits.values()))
        raise RecipeError(
            f"{str(folder)!r} holds files of several splits ({names}); name those of one, e.g. {named!r}, or all of "
            f"them with a glob, e.g. {str(folder / '**' / '*.*')!r}"
        )


def _why_no_file(path: Path) -> str | None:
    """Why what a path names is neither a file nor a folder; None where it names nothing."""
    if path.is_symlink() and not os.path.exists(path):
        return f"is a link to {os.readlink(path)!r}, which does not exist"
    return "is no file of rows, but a device or a pipe" if os.path.exists(path) else None


def _what_to_name(path: str) -> str:
    """Advice about a path that does not exist."""
    if re.match(r"\w+://", path):
        return "addresses are not read; download the file, and name it"
    parts = [part.strip() for part in path.split(",")]
    if len(parts) > 1 and all(map(_is_data, parts)):
        return f"of several files write --data.sources '[{', '.join(f'{{path: {part}}}' for part in parts)}]'"
    of_swift = re.fullmatch(r"(.+)#(\d+)", path)
    if of_swift is not None and Path(of_swift[1]).expanduser().exists():
        return f"of some rows write --data.sources '[{{path: {of_swift[1]}, max_rows: {of_swift[2]}}}]'"
    folder = Path(path).expanduser().parent
    with suppress(OSError):
        names = [file.name for file in folder.iterdir() if _is_data(file.name)] if folder.is_dir() else []
        names = [name for name in names if name != Path(path).name]
        if near := get_close_matches(Path(path).name, names, n=1, cutoff=0.75):
            return f"did you mean {str(folder / near[0])!r}?"
    if not folder.is_absolute() and not folder.is_dir():
        return f"there is no folder {str(folder)!r} here (in {os.getcwd()})"
    return "give a file, a folder, a glob, or a hub data set's name"


def shared_content(some: Iterable[Source], others: Iterable[Source]) -> list[str]:
    """Files that sources of both groups read, or hub data sets with subset and split, sorted."""
    one, other = ({name for source in group for name in source.content_names()} for group in (some, others))
    return sorted(one & other)


def _check_saved(folder: Path) -> None:
    """Refuse a saved data set that names files outside its folder: `datasets` does not check their paths."""
    for state in folder.rglob("state.json"):
        try:
            names = [str(entry["filename"]) for entry in json.loads(state.read_text(encoding="utf-8"))["_data_files"]]
        except (OSError, ValueError, RecursionError, LookupError, TypeError) as error:
            raise RecipeError(f"{state}: is no state of a saved data set ({type(error).__name__}: {error})") from error
        if outside := [name for name in names if Path(name).is_absolute() or ".." in Path(name).parts]:
            raise RecipeError(
                f"{folder}: state.json names a file outside of the folder ({outside[0]!r}); save it again"
            )


def _arrow_rows(path: str, rows: "Dataset | IterableDataset") -> Iterator[tuple[str, RawRow | BadRow]]:
    from datasets import Dataset

    with explained(f"{path}: cannot be read", "fix or remove it"):
        rows = rows.to_iterable_dataset() if isinstance(rows, Dataset) else rows
        # CSV, text and most JSON read over the network have no declared columns, and nothing is decoded.
        numbered = enumerate(_without_media(rows) if rows.features else rows, 1)
    while True:
        with explained(f"{path}: cannot be read", "fix or remove it"):
            numbered_row = next(numbered, None)
        if numbered_row is None:
            return
        yield f"{path}, row {numbered_row[0]}", _without_padding(numbered_row[1])


def _without_media(rows: "IterableDataset") -> "IterableDataset":
    """The rows with images, audio and video left as they are, whose decoding opens or downloads paths that rows name.

    ``datasets`` decodes all columns or none; those of JSON, whose objects have unequal keys, would stay text.
    """
    from datasets import Features

    return rows.cast(Features.from_dict(_with_decoded_json(rows.decode(False).features.to_dict())))


def _with_decoded_json(entry: Any) -> Any:
    """Columns as ``Features.to_dict`` has them, with JSON decoded."""
    if isinstance(entry, list):
        return [_with_decoded_json(item) for item in entry]
    if not isinstance(entry, dict):
        return entry
    if entry.get("_type") == "Json":
        return {**entry, "decode": True}
    return {key: _with_decoded_json(value) for key, value in entry.items()}


def _without_padding(row: RawRow) -> RawRow:
    """Drop keys that Arrow adds: each struct of a column has the keys of all rows, with None where a row has none."""
    return {key: _without_padding_within(value) for key, value in row.items() if value is not None}


def _without_padding_within(value: object) -> object:
    if isinstance(value, dict):
        return _without_padding(value)
    return [_without_padding_within(item) for item in value] if isinstance(value, list) else value


# --- files -----------------------------------------------------------------------------------------


def _file_rows(file: Path, document: str, may_be_json: bool) -> Iterator[tuple[str, RawRow | BadRow]]:
    try:
        yield from _rows_by_suffix(file, document, may_be_json)
    except (OSError, EOFError, zlib.error) as error:
        raise RecipeError(f"{file}: cannot be read ({error}); fix or remove it") from error


def _rows_by_suffix(file: Path, document: str, may_be_json: bool) -> Iterator[tuple[str, RawRow | BadRow]]:
    suffixes = [suffix.lower() for suffix in file.suffixes]
    refuse_pointer(file, str(file))
    if suffixes[-1] == ".parquet":
        return _parquet_rows(file)
    if file.stat().st_size == 0:
        raise RecipeError(f"{file}: is empty; at least one row is needed")
    kind = suffixes[-2] if suffixes[-1] == ".gz" else suffixes[-1]
    if kind in (".json", ".jsonl"):
        return _json_rows(file)
    if kind in (".csv", ".tsv"):
        return _csv_rows(file, "\t" if kind == ".tsv" else ",")
    return _text_rows(file, document, may_be_json)


def _open(file: Path) -> IO[bytes] | gzip.GzipFile:
    stream = gzip.open(file) if file.suffix.lower() == ".gz" else file.open("rb")  # noqa: SIM115 (the caller closes it)
    start = stream.read(3)
    if start[:2] in (b"\xff\xfe", b"\xfe\xff"):
        stream.close()
        raise RecipeError(
            f"{file}: is UTF-16, which Windows calls Unicode; convert the file to UTF-8 "
            "(iconv -f UTF-16 -t UTF-8 FILE > NEW)"
        )
    if start != b"\xef\xbb\xbf":  # a byte-order mark, as Windows editors write it
        stream.seek(0)
    return stream


def _parquet_rows(file: Path) -> Iterator[tuple[str, RawRow | BadRow]]:
    import datasets
    from pyarrow.parquet import read_metadata

    try:
        if not read_metadata(file).num_rows:  # as some parts of Spark's output; `datasets` fails at it
            return
        rows = datasets.load_dataset("parquet", data_files=escape(str(file)), split="train", streaming=True)
    except (OSError, ValueError) as error:
        raise RecipeError(f"{file}: is not a Parquet file ({str(error).splitlines()[0]}); fix or remove it") from error
    yield from _arrow_rows(str(file), rows)


def _json_rows(file: Path) -> Iterator[tuple[str, RawRow | BadRow]]:
    """Read a JSON list, or one object per line; the first character tells which, not the suffix."""
    with _open(file) as stream:
        is_list = stream.read(2**12).lstrip()[:1] == b"["
    if is_list:
        with _open(file) as stream:
            for number, row in enumerate(items_of_list(file, stream), 1):
                yield f"{file}, row {number}", _checked(row)
        return
    with _open(file) as stream:
        refuse_one_object(file, stream)
    with _open(file) as stream:
        for number, line in _lines(file, stream):
            if line.strip():
                yield f"{file}:{number}", _parse_line(line)


def _lines(file: Path, stream: IO[bytes] | gzip.GzipFile) -> Iterator[tuple[int, bytes]]:
    """Lines with their numbers; refuses a longer line than a row can be before it is read in full."""
    for number, line in enumerate(iter(partial(stream.readline, LONGEST_ROW_BYTES + 1), b""), 1):
        if len(line) > LONGEST_ROW_BYTES:
            raise RecipeError(
                f"{file}:{number}: is longer than {LONGEST_ROW_BYTES // 2**20} MiB, which is no row to train on; "
                "write each row on a line of its own"
            )
        yield number, line


def _parse_line(line: bytes) -> RawRow | BadRow:
    try:
        return _checked(ROW_DECODER.decode(line.decode("utf-8")))
    except UnicodeDecodeError as error:
        return BadRow(f"is not UTF-8 (byte {error.start} of the line); {TO_UTF_8}")
    except json.JSONDecodeError as error:
        where = f"column {error.colno}: {error.msg}"
        return BadRow(f"is not JSON ({where}); each line must be one object, or the whole file a list of them")
    except (ValueError, RecursionError) as error:
        return BadRow(f"is not JSON that can be read ({error}); fix the line")


def _checked(row: object) -> RawRow | BadRow:
    if not isinstance(row, dict):
        return BadRow(f"is a JSON {type(row).__name__}; each row must be an object")
    level: list[dict[str, object] | list[object]] = [row]
    for _ in range(DEEPEST):
        level = [
            item
            for holder in level
            for item in (holder.values() if isinstance(holder, dict) else holder)
            if isinstance(item, dict | list)
        ]
        if not level:
            return row
    return BadRow(f"is nested more than {DEEPEST} deep, which no format is; fix the row")


def _csv_rows(file: Path, delimiter: str) -> Iterator[tuple[str, RawRow | BadRow]]:
    # Not with pandas or Arrow: they would read an answer of 042 as the number 42, and "NA" as a missing value.
    csv.field_size_limit(LONGEST_ROW_BYTES)
    with _open(file) as stream:
        reader = csv.reader(_decoded(file, stream), delimiter=delimiter, strict=True)
        lines = (cells for cells in reader if cells)
        try:
            columns = next(lines, [])
            if doubled := [name for name in columns if columns.count(name) > 1]:
                raise RecipeError(f"{file}:1: has two columns {doubled[0]!r}; rename one")
            for cells in lines:
                if len(cells) == len(columns):
                    row: RawRow | BadRow = dict(zip(columns, cells, strict=True))
                else:
                    sign = "tabs" if delimiter == "\t" else "commas"
                    row = BadRow(f"has {len(cells)} cells under {len(columns)} columns; quote cells that hold {sign}")
                yield f"{file}:{reader.line_num}", row
        except csv.Error as error:
            if "new-line character" in str(error):  # a CR within a cell, which is one line to all others
                raise RecipeError(f"{file}: its lines end with CR alone; save it with LF or CR and LF") from error
            raise RecipeError(f"{file}:{max(reader.line_num, 1)}: is not CSV ({error}); fix the quotes") from error


def _text_rows(file: Path, document: str, may_be_json: bool) -> Iterator[tuple[str, RawRow | BadRow]]:
    with _open(file) as stream:
        start = stream.read(2**12)
        if b"\0" in start:
            raise RecipeError(f"{file}: holds null bytes, as UTF-16 does; convert the file to UTF-8")
        if not may_be_json and (json_start := _JSON_ROWS.match(start)):
            ending = ".json" if json_start[1] else ".jsonl (a row a line) or .json"
            raise RecipeError(
                f"{file}: holds JSON, and would be read as raw text, keys and braces included; rename it to {ending}, "
                "or set data.format (or format of its source) to completion if text is meant"
            )
    with _open(file) as stream:
        if document == "file":
            yield str(file), {"text": "".join(_decoded(file, stream))}
            return
        for number, line in enumerate(_decoded(file, stream), 1):
            if line.strip():
                yield f"{file}:{number}", {"text": line.rstrip("\r\n")}


_JSON_ROWS = re.compile(rb'\s*(\[\s*)?\{\s*"')


def _decoded(file: Path, stream: IO[bytes] | gzip.GzipFile) -> Iterator[str]:
    for number, line in _lines(file, stream):
        try:
            yield line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise RecipeError(f"{file}:{number}: is not UTF-8; {TO_UTF_8}") from error
