import gzip
import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any

import pytest
from shared_fixtures import make_tokenizer

from lit_ft import RecipeError, TextDataModule
from lit_ft.data.text import json_object, sources
from lit_ft.data.text.json_list import TO_UTF_8
from lit_ft.data.text.sources import Source
from lit_ft.errors import BadRow
from lit_ft.packed_batch import IGNORE_INDEX

BOM = b"\xef\xbb\xbf"
A, B = {"text": "a", "n": 1}, {"text": "红", "n": None}
LINES = json.dumps(A).encode() + b"\n" + json.dumps(B, ensure_ascii=False).encode() + b"\n"
LIST = json.dumps([A, B], ensure_ascii=False).encode()


def read(path: Path | str, **options: Any) -> list[tuple[str, Any]]:
    """Places without their folder, and rows; of a bad row the message."""
    folder = f"{Path(path).parent}/"
    return [
        (place.removeprefix(folder), str(row) if isinstance(row, BadRow) else row)
        for place, row in Source(str(path), **options).rows()
    ]


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write a file below a folder; returns its path."""

    def to(name: str, content: bytes) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
        return path

    return to


# --- JSON ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl", "rows.json.gz", "rows.jsonl.gz", "rows.v2.json"])
@pytest.mark.parametrize("start", [b"", BOM, BOM + b" \r\n\t"])
def test_json_is_a_list_or_lines_whatever_its_suffix(write: Any, name: str, start: bytes) -> None:
    path = write(name, start + LIST)
    assert read(path) == [(f"{name}, row 1", A), (f"{name}, row 2", B)]
    first = 1 + start.count(b"\n")
    path = write(name, start + LINES)
    assert read(path) == [(f"{name}:{first}", A), (f"{name}:{first + 1}", B)]


def test_json_lines_name_the_line(write: Any) -> None:
    lines = [
        b'{"text": "a"}',
        b"",
        b'{"text" "a"}\r',
        b"3",
        b'["a"]',
        b'{"text": "caf\xe9"}',
        b'{"n": ' + b"[" * 100_000,
        b'{"n": ' + b"9" * 5000 + b"}",
        b'{"text": "\\ud800"} ',
        b'{"text": "b"}',
        b'{"text": "a", "n": {"m": 1}, "text": "b"}',
    ]
    path = write("rows.jsonl", b"\n".join(lines))
    must = "each line must be one object, or the whole file a list of them"
    assert read(path) == [
        ("rows.jsonl:1", {"text": "a"}),
        ("rows.jsonl:3", f"is not JSON (column 9: Expecting ':' delimiter); {must}"),
        ("rows.jsonl:4", "is a JSON int; each row must be an object"),
        ("rows.jsonl:5", "is a JSON list; each row must be an object"),
        ("rows.jsonl:6", f"is not UTF-8 (byte 13 of the line); {TO_UTF_8}"),
        (
            "rows.jsonl:7",
            "is not JSON that can be read (maximum recursion depth exceeded while decoding a JSON array from a "
            "unicode string); fix the line",
        ),
        (
            "rows.jsonl:8",
            "is not JSON that can be read (Exceeds the limit (4300 digits) for integer string conversion: value has "
            "5000 digits; use sys.set_int_max_str_digits() to increase the limit); fix the line",
        ),
        ("rows.jsonl:9", {"text": "\ud800"}),
        ("rows.jsonl:10", {"text": "b"}),
        ("rows.jsonl:11", "is not JSON that can be read (the key 'text' is there twice); fix the line"),
    ]


def test_a_list_names_the_row_that_is_no_object(write: Any) -> None:
    path = write("rows.json", b'[{"text": "a"}, 3, null, [{}]]')
    assert [row for _, row in read(path)] == [
        {"text": "a"},
        "is a JSON int; each row must be an object",
        "is a JSON NoneType; each row must be an object",
        "is a JSON list; each row must be an object",
    ]


def test_json_of_one_object_over_several_lines(write: Any) -> None:
    (place, message), *_ = read(write("rows.json", b'{\n "data": [}\n}'))
    assert place == "rows.json:1"
    assert message.endswith("each line must be one object, or the whole file a list of them")


# --- CSV, TSV, text ----------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [b"", BOM])
@pytest.mark.parametrize("ending", [b"\n", b"\r\n"])
@pytest.mark.parametrize("gz", ["", ".gz"])
def test_cells_stay_the_text_that_they_are(write: Any, start: bytes, ending: bytes, gz: str) -> None:
    table = start + b'q,a\n042,NA\n"x, ""y""","two\nlines"\n\nnull,\n'.replace(b"\n", ending)
    lines = "two\r\nlines" if ending == b"\r\n" else "two\nlines"
    name = f"rows.csv{gz}"
    assert read(write(name, table)) == [
        (f"{name}:2", {"q": "042", "a": "NA"}),
        (f"{name}:4", {"q": 'x, "y"', "a": lines}),
        (f"{name}:6", {"q": "null", "a": ""}),
    ]


def test_tabs_part_cells(write: Any) -> None:
    assert read(write("rows.tsv", b"q\ta\n1,5\tb\n1\tb\tc\n")) == [
        ("rows.tsv:2", {"q": "1,5", "a": "b"}),
        ("rows.tsv:3", "has 3 cells under 2 columns; quote cells that hold tabs"),
    ]


def test_a_row_of_another_number_of_cells(write: Any) -> None:
    assert read(write("rows.csv", b"\n,q,a\n0,q,a\n1,q\n2,q,a,b,c\n")) == [
        ("rows.csv:3", {"": "0", "q": "q", "a": "a"}),  # pandas writes a column without a name
        ("rows.csv:4", "has 2 cells under 3 columns; quote cells that hold commas"),
        ("rows.csv:5", "has 5 cells under 3 columns; quote cells that hold commas"),
    ]


def test_text_by_line_and_by_file(write: Any) -> None:
    path = write("rows.txt", BOM + "one \r\n\n \ntwo\rtwo\n红".encode())
    assert read(path) == [
        ("rows.txt:1", {"text": "one "}),
        ("rows.txt:4", {"text": "two\rtwo"}),
        ("rows.txt:5", {"text": "红"}),
    ]
    assert read(path, document="file") == [("rows.txt", {"text": "one \r\n\n \ntwo\rtwo\n红"})]
    assert read(write("rows.md.gz", b"# one\ntwo"), document="file") == [("rows.md.gz", {"text": "# one\ntwo"})]


# --- Arrow -------------------------------------------------------------------------------------------

TURNS = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "weight": 1}]


def test_parquet_without_what_arrow_adds(tmp_path: Path) -> None:
    import datasets

    path = tmp_path / "rows[1].parquet"
    rows: Any = [{"messages": TURNS, "score": 1.5}, {"messages": TURNS[:1], "tools": ["x", None]}]
    datasets.Dataset.from_list([{"score": None, "tools": None, **row} for row in rows]).to_parquet(path)
    assert read(path) == [(f"rows[1].parquet, row {n}", row) for n, row in enumerate(rows, 1)]


def test_parquet_that_pyarrow_wrote(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"input_ids": [[1, 2], [3]], "text": ["a", "b"]})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet", row_group_size=1)
    assert [row for _, row in read(tmp_path / "rows.parquet")] == [
        {"input_ids": [1, 2], "text": "a"},
        {"input_ids": [3], "text": "b"},
    ]


def test_parts_of_parquet_without_rows(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    for name, texts in (("part-0.parquet", []), ("part-1.parquet", ["a"])):
        pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.array(texts, "string")}), tmp_path / name)
    assert [row for _, row in read(tmp_path)] == [{"text": "a"}]


def test_saved_data_sets(tmp_path: Path) -> None:
    import datasets

    data = datasets.Dataset.from_list([{"text": "a"}, {"text": "b"}])
    data.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": data, "test": data.select([1])}).save_to_disk(tmp_path / "two")
    assert read(tmp_path / "one") == [("one, row 1", {"text": "a"}), ("one, row 2", {"text": "b"})]
    assert read(tmp_path / "two") == [("two, row 1", {"text": "a"}), ("two, row 2", {"text": "b"})]
    assert read(tmp_path / "two", split="test") == [("two, row 1", {"text": "b"})]
    with pytest.raises(RecipeError, match="two: has no split 'val'; its splits are train, test"):
        read(tmp_path / "two", split="val")


def test_saved_objects_of_unequal_keys_are_objects_and_media_are_left_as_they_are(tmp_path: Path) -> None:
    from datasets import Dataset, Features, Image, Json, List, Value

    features = Features({"turns": List(Json()), "picture": Image(), "text": Value("string")})
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"x": 1}}]},
    ]
    row = {"turns": turns, "picture": {"path": None, "bytes": b"no image"}, "text": "b"}
    Dataset.from_list([row], features=features).save_to_disk(tmp_path / "one")
    assert read(tmp_path / "one") == [("one, row 1", {**row, "picture": {"bytes": b"no image"}})]


def test_options_that_choose_nothing_are_refused(write: Any, tmp_path: Path) -> None:
    import datasets

    path, folder = write("a.jsonl", LINES), tmp_path / "one"
    datasets.Dataset.from_list([A], split=datasets.Split("dev")).save_to_disk(folder)
    assert read(folder, split="dev") == read(folder)
    for source, options, message in (
        (path, {"split": "test"}, "a.jsonl: split='test' chooses a part of a hub data set"),
        (path, {"subset": "en"}, "a.jsonl: subset='en' chooses a part of a hub data set"),
        (path, {"document": "file"}, "a.jsonl: document=file is for .txt and .md files, and there is none"),
        (folder, {"split": "test"}, "one: has no split 'test', but is one data set"),
        (folder, {"subset": "en"}, "one: subset='en' is for hub data sets"),
    ):
        with pytest.raises(RecipeError, match=re.escape(message)):
            read(source, **options)


def test_data_in_memory_is_refused_with_what_to_do(tmp_path: Path) -> None:
    from datasets import Dataset

    with pytest.raises(RecipeError, match=r"type Dataset, .*; write .*, e.g. dataset.save_to_disk\("):
        TextDataModule(Dataset.from_list([{"text": "a"}]))
    assert Source(tmp_path / "a.json") == Source(str(tmp_path / "a.json"))


def test_a_hub_name_that_cannot_be_had() -> None:
    start = time.monotonic()
    with pytest.raises(
        RecipeError, match=r"'nobody/nothing' is no file or folder here \(in /.*\), and cannot be had from the hub \("
    ):
        read("nobody/nothing")
    assert time.monotonic() - start < 20


# --- folders, globs, parts ---------------------------------------------------------------------------


def test_a_folder_and_a_glob(write: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "lightning.pytorch")
    for name in ("b.jsonl", "a.json", "deep/c.jsonl.gz", ".cache/d.json", "README.md", "LICENSE.txt", "plot.png"):
        write(f".cache/data/{name}", json.dumps({"text": name}).encode())
    folder = tmp_path / ".cache" / "data"  # a folder may itself lie in a cache
    assert [row["text"] for _, row in read(folder)] == ["a.json", "b.jsonl", "deep/c.jsonl.gz"]
    left = "3 files are not data and were left out: LICENSE.txt, README.md, plot.png"
    assert Source(str(folder)).left_out() == left
    for streaming in (False, True):
        caplog.clear()
        TextDataModule(str(folder), streaming=streaming).load(make_tokenizer(), "fit")
        assert [line for line in caplog.messages if "left out" in line] == [f"{folder}: {left}"]
    assert [row["text"] for _, row in read(folder / "*.json*")] == ["a.json", "b.jsonl"]
    assert [row["text"] for _, row in read(f"{folder}/**/*.gz")] == ["deep/c.jsonl.gz"]


def test_files_of_two_formats_in_a_folder(write: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "lightning.pytorch")
    write("data/a.json", b'[{"instruction": "red", "output": "book"}, {"instruction": "blue", "output": 7}]')
    turns = [{"from": "human", "value": "red"}, {"from": "gpt", "value": "book"}]
    write("data/b.json", json.dumps([{"conversations": turns}]).encode())
    data = TextDataModule(str(tmp_path / "data"), on_bad_row="skip")
    data.load(make_tokenizer(), "fit")
    (line,) = (line for line in caplog.messages if "2 of 3 rows cannot be used, skipped" in line)
    assert line.count("it has the columns of sharegpt: give files of that format a source of their own") == 1
    assert "'output' is an int" in line


def test_files_of_a_folder_that_are_no_rows(write: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "lightning.pytorch")
    for name in ("a.json", "._a.json", ".ipynb_checkpoints/a-checkpoint.json", "dataset_infos.json"):
        write(f"data/{name}", b'[{"text": "a"}]')
    write("more/b.json", b'[{"text": "b"}]')
    (tmp_path / "data" / "more").symlink_to(tmp_path / "more")
    assert [row for _, row in read(tmp_path / "data")] == [{"text": "a"}]
    left = "._a.json, a-checkpoint.json, dataset_infos.json, more (a linked folder)"
    assert Source(f"{tmp_path}/data").left_out() == f"4 files are not data and were left out: {left}"
    (tmp_path / "data" / "c.json").symlink_to("gone.json")
    for path in (tmp_path / "data", f"{tmp_path}/data/*.json"):
        with pytest.raises(
            RecipeError, match="c.json' is a link to 'gone.json', which does not exist; remove it, or put"
        ):
            read(path)


def test_many_files_are_listed_without_a_comparison_of_each_with_all(
    write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = [write(f"folder/{number:03d}.jsonl", LINES) for number in range(200)]
    compared: list[object] = []
    monkeypatch.setattr(PurePath, "__eq__", lambda self, other: bool(compared.append(other)) or str(self) == str(other))
    assert Source(str(tmp_path / "folder")).files() == written
    assert len(compared) <= 1000


@pytest.mark.parametrize(
    ("names", "alone"),
    [
        (["data/train-00000-of-00001.jsonl", "data/test-00000-of-00001.jsonl"], "**/*train*"),
        (["alpaca.Train.jsonl", "alpaca.dev.jsonl"], "**/*Train*"),
        (["en/train/0.jsonl", "en/validation/0.jsonl"], "en/train"),
        (["val.jsonl", "test_2.jsonl"], "**/*test*"),
    ],
)
def test_a_folder_of_several_splits(write: Any, tmp_path: Path, names: list[str], alone: str) -> None:
    for name in names:
        write(name, json.dumps({"text": name}).encode())
    with pytest.raises(RecipeError) as refused:
        read(tmp_path)
    start, _, all_of_them = str(refused.value).partition(", or all of them with a glob, e.g. ")
    assert "holds files of several splits (" in start
    assert start.endswith(f"name those of one, e.g. '{tmp_path}/{alone}'")
    one = {"val.jsonl": "test_2.jsonl"}.get(names[0], names[0])
    assert [row for _, row in read(tmp_path / alone)] == [{"text": one}]
    assert [row for _, row in read(all_of_them.strip("'"))] == [{"text": name} for name in sorted(names)]


def test_words_that_stand_for_no_split(write: Any, tmp_path: Path) -> None:
    for name in ("train.jsonl", "contest.jsonl", "developer.jsonl", "retest.jsonl"):
        write(name, b'{"text": "a"}')
    assert len(read(tmp_path)) == 4


def test_some_of_the_rows(write: Any, tmp_path: Path) -> None:
    for name in "ab":
        write(f"{name}.txt", b"1\n2\n3\n")
    write("empty.csv", b"text\n")

    def texts(skip: int = 0, **options: Any) -> list[str]:
        return [row["text"] for _, row in Source(str(tmp_path), **options).rows(skip)]  # type: ignore[index]

    assert texts() == ["1", "2", "3", "1", "2", "3"]
    assert texts(max_rows=4) == ["1", "2", "3", "1"]
    assert texts(skip=2) == ["3", "1", "2", "3"]
    assert texts(skip=2, max_rows=4) == ["3", "1"]  # max_rows counts from the top
    assert texts(skip=5, max_rows=4) == []


@pytest.mark.parametrize("rows", [0, -1])
def test_max_rows_is_a_number_of_rows(rows: int) -> None:
    with pytest.raises(RecipeError, match=f"rows.json: max_rows={rows} must be 1 or more; leave it out for all rows"):
        Source("rows.json", max_rows=rows)


def test_the_digest_follows_the_content(write: Any, tmp_path: Path) -> None:
    digests = set()
    for name, content in (("a.txt", b"1\n"), ("a.txt", b"2\n"), ("b.txt", b"1\n"), (os.fsdecode(b"\xff.txt"), b"1\n")):
        for file in tmp_path.iterdir():
            file.unlink()
        path = write(name, content)
        assert Source(str(path)).digest() == Source(str(path), name="other").digest()
        digests.add(Source(str(path)).digest())
    assert len(digests) == 4


# --- files that cannot be read -----------------------------------------------------------------------

HIGH = b"caf\xe9\n"
RANDOM = os.urandom(3000).hex().encode()

BROKEN: dict[str, tuple[str, bytes, str]] = {
    "no UTF-8 in a list": (
        "a.json",
        b'[{"text": "a"},\n{"text": "caf\xe9"}]',
        "a.json:2: is not UTF-8 (byte 29); convert",
    ),
    **{
        f"UTF-16 in {suffix}": (
            f"a{suffix}",
            "instruction,output\nred,红\n".encode("utf-16"),
            f"a{suffix}: is UTF-16, which Windows calls Unicode; convert the file to UTF-8 (iconv -f UTF-16 -t UTF-8",
        )
        for suffix in (".json", ".jsonl", ".csv", ".tsv", ".txt")
    },
    "UTF-16 without a mark": ("a.txt", "red\n".encode("utf-16-le"), "a.txt: holds null bytes, as UTF-16 does; convert"),
    "Git's pointer": (
        "a.jsonl",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n",
        "a.jsonl is Git's pointer to the file, not the file; run `git lfs pull` in the folder",
    ),
    "no UTF-8 in CSV": (
        "a.csv",
        b"text\nx\n" + HIGH,
        "a.csv:3: is not UTF-8; convert the file to UTF-8 (from a Chinese Windows: iconv -f GB18030",
    ),
    "no UTF-8 in text": ("a.txt", b"x\n\n" + HIGH + b"y\n", "a.txt:3: is not UTF-8; convert the file to UTF-8"),
    "no JSON": (
        "a.json",
        b'[{"a": 1},\n {"b" 2}]',
        "a.json:2: is not JSON (column 7: Expecting ':' delimiter); fix it",
    ),
    "half a list": ("a.json", b'[{"a": 1},\n', "a.json:2: is not JSON (column 1: Expecting value); fix it"),
    "two lists": ("a.jsonl", b"[1]\n[2]\n", "a.jsonl:2: is not JSON (column 1: Extra data); fix it"),
    "deep list": (
        "a.json",
        b"[" * 100_000,
        "a.json, row 1: is not JSON that can be read (maximum recursion depth exceeded",
    ),
    "huge integer": (
        "a.json",
        b"[" + b"9" * 5000 + b"]",
        "a.json, row 1: is not JSON that can be read (Exceeds the limit (4300",
    ),
    "a key twice": (
        "a.json",
        b'[{"a": 1}, {"a": {"b": 1, "b": 2}}]',
        "a.json, row 2: is not JSON that can be read (the key 'b' is there twice); fix it",
    ),
    "open quotes": ("a.csv", b'q,a\n1,"2\n\n', "a.csv:3: is not CSV (unexpected end of data); fix the quotes"),
    "quote amid a cell": ("a.csv", b'q,a\n"1"2,3\n', "a.csv:2: is not CSV ('"),
    "old line ends": ("a.csv", b"q,a\r1,2\r", "a.csv: its lines end with CR alone; save it with LF or CR and LF"),
    "a column twice": ("a.csv", b"q,a,q\n1,2,3\n", "a.csv:1: has two columns 'q'; rename one"),
    "empty": ("a.jsonl", b"", "a.jsonl: is empty; at least one row is needed"),
    "no Parquet": ("a.parquet", b"PAR1", "a.parquet: is not a Parquet file ("),
    "empty Parquet": ("a.parquet", b"", "a.parquet: is not a Parquet file ("),
    "unknown suffix": (
        "a.xlsx",
        b"x",
        "a.xlsx: .xlsx is not read; give .json, .jsonl, .csv, .tsv, .txt, .md, .json.gz",
    ),
    "packed in another way": ("a.jsonl.zst", b"x", "a.jsonl.zst: .zst is not read; unpack it first"),
    "no suffix": ("rows", b"x", "rows: no suffix is not read; give .json"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_files_that_cannot_be_read(write: Any, tmp_path: Path, name: str) -> None:
    file, content, message = BROKEN[name]
    with pytest.raises(RecipeError, match=re.escape(f"{tmp_path}/{message}")):
        read(write(file, content))


@pytest.mark.parametrize("suffix", [".json.gz", ".csv.gz", ".txt.gz"])
def test_broken_compression(tmp_path: Path, suffix: str) -> None:
    whole = gzip.compress(b"text\n" + RANDOM)
    for content, why in (
        (b"text", "Not a gzipped file (b'te')"),
        (whole[:-9], "Compressed file ended before the end-of-stream marker was reached"),
        (whole[:50] + b"\xff" * 100 + whole[150:], ""),  # zlib says various things
    ):
        path = tmp_path / f"rows{suffix}"
        path.write_bytes(content)
        with pytest.raises(RecipeError, match=re.escape(f"{path}: cannot be read ({why}")):
            read(path)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("", r"'.*' holds no file that can be read \(.json, .*\); name another folder"),
        ("*.json", r"'.*/\*.json' holds no file that can be read"),
        ("nope.json", "'.*nope.json' does not exist; give a file, a folder, a glob, or a hub data set's name"),
        ("raws.jsonl", "'.*raws.jsonl' does not exist; did you mean '.*/rows.jsonl'[?]"),
        ("rows.jsonl#500", "of some rows write --data.sources '\\[{path: .*/rows.jsonl, max_rows: 500}\\]'"),
        ("nope.jsonl#500", "'.*nope.jsonl#500' does not exist; give a file, a folder"),
        ("nope", "'.*nope' does not exist; give a file, a folder, a glob, or a hub data set's name"),
    ],
)
def test_there_is_nothing(tmp_path: Path, path: str, message: str) -> None:
    (tmp_path / "README.md").write_text("no data")
    if path in ("raws.jsonl", "rows.jsonl#500"):
        (tmp_path / "rows.jsonl").write_text("{}")
    with pytest.raises(RecipeError, match=message):
        read(tmp_path / path)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("https://host/a/rows.json", "addresses are not read; download the file, and name it"),
        ("none/rows.json", f"there is no folder 'none' here (in {os.getcwd()})"),
        ("a.json, b.jsonl", "of several files write --data.sources '[{path: a.json}, {path: b.jsonl}]'"),
    ],
)
def test_what_is_no_path(path: str, message: str) -> None:
    with pytest.raises(RecipeError) as refused:
        Source(path).files()
    assert str(refused.value) == f"{path!r} does not exist; {message}"


def test_what_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "a.json").symlink_to("gone.json")
    with pytest.raises(RecipeError, match="a.json' is a link to 'gone.json', which does not exist; give a file"):
        read(tmp_path / "a.json")
    os.mkfifo(tmp_path / "b.json")
    with pytest.raises(RecipeError, match="b.json' is no file of rows, but a device or a pipe; "):
        read(tmp_path / "b.json")


def test_endings_in_capitals(tmp_path: Path) -> None:
    (tmp_path / "ROWS.CSV").write_text("a,b\n1,2\n")
    (tmp_path / "MORE.JSON.GZ").write_bytes(gzip.compress(b'[{"a": "3"}]'))
    assert [row for _, row in Source(str(tmp_path)).rows()] == [{"a": "3"}, {"a": "1", "b": "2"}]


@pytest.mark.parametrize("content", [b"[]", b"\n\n", BOM])
@pytest.mark.parametrize("form", ["auto", "alpaca"])
def test_files_without_rows(write: Any, content: bytes, form: Any) -> None:
    data = TextDataModule(str(write("rows.json", content)), format=form)
    with pytest.raises(RecipeError, match="rows.json' holds no row"):
        data.load(make_tokenizer())


# --- real data ---------------------------------------------------------------------------------------

REAL = Path(os.environ.get("LIT_FT_TEST_DATA") or "absent")
FILES = {
    "huanhuan.json": 3729,
    "alpaca_en_demo.json": 999,
    "alpaca_zh_demo.json": 1000,
    "dummy_conversation.json": 500,
    "glaive_toolcall_en_demo.json": 300,
    "identity.json": 91,
    "wiki_demo.txt": 30,
}


@pytest.mark.skipif(not REAL.is_dir(), reason="LIT_FT_TEST_DATA names no folder")
@pytest.mark.parametrize("name", FILES)
def test_real_data_loads_without_options(name: str) -> None:
    data = TextDataModule(str(REAL / name))
    data.load(make_tokenizer())
    (prepared,), samples = data.splits.prepared["train"], data.splits["train"]
    assert (prepared.rows, prepared.bad_rows) == (FILES[name], 0)
    assert samples.supervised.min() > 0
    assert all(
        labels[labels != IGNORE_INDEX].tolist() == ids[labels != IGNORE_INDEX].tolist()
        for ids, labels in (samples[i] for i in range(0, len(samples), 7))
    )


def test_a_row_nested_too_deep_is_bad_in_either_file(tmp_path: Path) -> None:
    deep = '{"text": "a", "x": ' + "[" * 200 + "]" * 200 + "}"
    for name, content in (("a.json", f"[{deep}]"), ("a.jsonl", deep)):
        (tmp_path / name).write_text(content)
        ((_, row),) = Source(str(tmp_path / name)).rows()
        assert str(row) == "is nested more than 100 deep, which no format is; fix the row"


# --- JSON under another name, and rows that are none -------------------------------------------------


@pytest.mark.parametrize("name", ["rows.txt", "rows.md", "rows.txt.gz"])
@pytest.mark.parametrize("content", [LINES, LIST, BOM + b" \n[\n  {\n" + LIST[2:]])
def test_json_is_not_read_as_text(write: Any, name: str, content: bytes) -> None:
    path = write(name, content)
    with pytest.raises(RecipeError, match=r"holds JSON, and would be read as raw text.*rename it to \.json.*, or set"):
        list(Source(str(path)).rows())
    assert [row for _, row in Source(str(path), format="completion").rows()]


def test_text_with_braces_is_text(write: Any) -> None:
    path = write("a.txt", b"{red} book\n[blue] {}\n")
    assert [row["text"] for _, row in read(path)] == ["{red} book", "[blue] {}"]


def test_a_first_line_that_is_too_long_is_no_object_over_several_lines(
    write: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (sources, json_object):
        monkeypatch.setattr(module, "LONGEST_ROW_BYTES", 2**20)
    path = write("rows.jsonl", b'{"text": "' + b"x" * 2**20 + b'"}\n')
    with pytest.raises(RecipeError, match=r":1: is longer than 1 MiB, which is no row to train on; write each"):
        list(Source(str(path)).rows())


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.txt", "rows.csv", "rows.jsonl.gz"])
def test_a_line_that_does_not_end_is_refused(write: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "LONGEST_ROW_BYTES", 2**20)
    path = write(name, b'text\n{"text": "' + b"x" * 2**21)
    with pytest.raises(RecipeError, match=r":2: is longer than 1 MiB, which is no row to train on; write each"):
        for _ in Source(str(path)).rows():
            pass
