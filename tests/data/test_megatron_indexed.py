"""Megatron's indexed data sets: the same bytes, each reads the other's."""

import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from shared_fixtures import make_tokenizer

from lit_ft import RecipeError, TextDataModule
from lit_ft.data.text.sources import Source
from lit_ft.data.tokens.megatron_indexed import IndexedWriter, read_documents

pytestmark = pytest.mark.slow

DOCUMENTS = [[5, 6, 7, 8], [9], [10, 11, 12], list(range(3, 80))]


def write(prefix: Path, vocabulary: int = 320, documents: Any = DOCUMENTS) -> Path:
    writer = IndexedWriter(prefix, vocabulary)
    for document in documents:
        writer.add(document)
    writer.close()
    return prefix


@pytest.mark.parametrize(("vocabulary", "dtype"), [(65_499, np.uint16), (65_500, np.int32)])
def test_what_is_written_is_read(tmp_path: Path, vocabulary: int, dtype: Any) -> None:
    ids, spans = read_documents(write(tmp_path / "data", vocabulary))
    assert isinstance(ids.base, np.memmap)
    assert ids.dtype == dtype
    assert [ids[start:end].tolist() for start, end in spans] == DOCUMENTS


@pytest.fixture(scope="module")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """``megatron.core.datasets.indexed_dataset``, installed for this test where there is a package index."""
    folder = tmp_path_factory.mktemp("megatron")
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--target",
        str(folder),
        "megatron-core==0.16.1",
    ]
    if subprocess.run(command, capture_output=True, timeout=300).returncode:
        pytest.skip("megatron-core cannot be installed here")
    sys.path.insert(0, str(folder))
    try:
        yield pytest.importorskip("megatron.core.datasets.indexed_dataset")
    finally:
        sys.path.remove(str(folder))


@pytest.mark.parametrize("vocabulary", [320, 151_936])
def test_the_same_bytes_as_megatron_and_each_reads_the_others(tmp_path: Path, megatron: Any, vocabulary: int) -> None:
    ours, theirs = write(tmp_path / "ours", vocabulary), tmp_path / "theirs"
    builder = megatron.IndexedDatasetBuilder(f"{theirs}.bin", dtype=megatron.DType.optimal_dtype(vocabulary))
    for document in DOCUMENTS:
        builder.add_document(torch.tensor(document), [len(document)])
    builder.finalize(f"{theirs}.idx")
    for suffix in (".bin", ".idx"):
        assert Path(f"{ours}{suffix}").read_bytes() == Path(f"{theirs}{suffix}").read_bytes()
    assert [document.tolist() for document in megatron.IndexedDataset(str(ours))] == DOCUMENTS
    ids, spans = read_documents(theirs)
    assert [ids[start:end].tolist() for start, end in spans] == DOCUMENTS


def test_megatrons_documents_of_several_sequences(tmp_path: Path, megatron: Any) -> None:
    builder = megatron.IndexedDatasetBuilder(str(tmp_path / "data.bin"), dtype=np.uint16)
    builder.add_document(torch.tensor([5, 6, 7, 8, 9]), [2, 3])
    builder.add_document(torch.tensor([10, 11]), [2])
    builder.finalize(str(tmp_path / "data.idx"))
    ids, spans = read_documents(tmp_path / "data")
    assert [ids[start:end].tolist() for start, end in spans] == [[5, 6, 7, 8, 9], [10, 11]]


@pytest.mark.parametrize("name", ["data.idx", "data.bin", "data"])
def test_as_training_data_without_a_copy(tmp_path: Path, name: str) -> None:
    write(tmp_path / "data")
    data = TextDataModule(str(tmp_path / name), max_length=40)
    data.load(make_tokenizer())
    samples = data.splits["train"]
    assert isinstance(samples.parts[0].ids.base, np.memmap)
    pieces = [samples[i][0].tolist() for i in range(len(samples))]
    long = DOCUMENTS[3]
    assert pieces == [DOCUMENTS[0], DOCUMENTS[2], long[:40], long[39:]]  # one token alone predicts nothing
    assert samples.supervised.tolist() == [3, 2, 39, 37]


def test_an_epoch_without_the_model(tmp_path: Path) -> None:
    write(tmp_path / "data")
    data = TextDataModule(str(tmp_path / "data"), max_length=40, packing=80)
    data.load(make_tokenizer())
    (unit, *_) = data.plan().units(data.splits["train"], 0)
    assert sum(data.splits["train"].lengths[unit]) <= 80


@pytest.mark.parametrize(
    "options",
    [
        {"format": "alpaca"},
        {"columns": {"text": "foo"}},
        {"split": "validation"},
        {"subset": "x"},
        {"document": "file"},
    ],
    ids=" ".join,
)
def test_options_of_rows_are_refused(tmp_path: Path, options: Any) -> None:
    write(tmp_path / "data")
    ((name, value),) = options.items()
    with pytest.raises(RecipeError, match=rf"data.bin: {name}={value!r} has no effect on indexed data, .*; leave it"):
        TextDataModule(sources=[Source(str(tmp_path / "data.bin"), **options)])


@pytest.mark.parametrize("options", [{"format": "alpaca"}, {"columns": {"instruction": "a"}}], ids=" ".join)
def test_options_of_rows_beside_indexed_data_are_those_of_the_rows(
    tmp_path: Path, write_rows: Any, options: Any
) -> None:
    path = str(write(tmp_path / "data"))
    rows = write_rows([{"a": "red", "instruction": "blue", "output": "cup"}])
    data = TextDataModule(sources=[Source(path, format="indexed"), Source(rows)], max_length=40, **options)
    data.load(make_tokenizer())
    assert data.splits["train"].source.tolist() == [0, 0, 0, 0, 1]


def test_a_stream_is_not_of_indexed_data(tmp_path: Path, write_rows: Any) -> None:
    write(tmp_path / "data")
    rows = write_rows()
    for name in ("data", "data.bin"):
        path = str(tmp_path / name)
        with pytest.raises(RecipeError, match=rf"'{path}' is indexed data, .* leave data\.streaming out"):
            TextDataModule(sources=[Source(rows), Source(path)], streaming=True)
    data = TextDataModule(rows, val_path=path, streaming=True)
    data.load(make_tokenizer())
    assert len(data.splits["val"]) > 0


BAD: dict[str, Any] = {
    "is no Megatron index": lambda idx, bin_: idx.write_bytes(b"PK" + idx.read_bytes()),
    "version 2, dtype code 8; version 1 with whole numbers is read": lambda idx, bin_: idx.write_bytes(
        idx.read_bytes()[:9] + struct.pack("<Q", 2) + idx.read_bytes()[17:]
    ),
    "data.idx is truncated": lambda idx, bin_: idx.write_bytes(idx.read_bytes()[:-30]),
    "data.bin is truncated": lambda idx, bin_: bin_.write_bytes(bin_.read_bytes()[:-30]),
    "data.bin does not exist; an indexed data set is two files": lambda idx, bin_: bin_.unlink(),
    "holds the token id 400, those of the tokenizer are 0 to": lambda idx, bin_: write(
        idx.with_suffix(""), documents=[[5, 400]]
    ),
    "holds no documents": lambda idx, bin_: write(idx.with_suffix(""), documents=[]),
}


@pytest.mark.parametrize("message", BAD)
def test_broken_files(tmp_path: Path, message: str) -> None:
    prefix = write(tmp_path / "data")
    BAD[message](Path(f"{prefix}.idx"), Path(f"{prefix}.bin"))
    with pytest.raises(RecipeError, match=message):
        TextDataModule(f"{prefix}.idx").load(make_tokenizer())
