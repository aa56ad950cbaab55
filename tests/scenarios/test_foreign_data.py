"""Data sets whose rows name files and addresses."""

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from lit_ft import RecipeError
from lit_ft.data.text.sources import Source

pytest.importorskip("PIL")


pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def listener() -> Any:
    """A server that nobody may connect to; who does gets no answer, and the test ends by its time limit."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        server.settimeout(0.2)
        yield server


IMAGE = {"_type": "Image"}


def table_of(address: str) -> pyarrow.Table:
    """Rows with an image that lies elsewhere; `datasets` itself would fetch it as it writes them."""
    images = [{"bytes": None, "path": address}] * 2
    kind = pyarrow.struct({"bytes": pyarrow.binary(), "path": pyarrow.string()})
    return pyarrow.table({"text": ["red", "blue"], "image": pyarrow.array(images, kind)})


def as_saved(table: pyarrow.Table, path: Path) -> Path:
    datasets.Dataset(table).save_to_disk(path)
    info = json.loads((path / "dataset_info.json").read_text())
    info["features"]["image"] = IMAGE
    (path / "dataset_info.json").write_text(json.dumps(info))
    return path


def as_parquet(table: pyarrow.Table, path: Path) -> Path:
    features = {"text": {"dtype": "string", "_type": "Value"}, "image": IMAGE}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    pyarrow.parquet.write_table(table.replace_schema_metadata(metadata), path.with_suffix(".parquet"))
    return path.with_suffix(".parquet")


@pytest.mark.parametrize("write", [as_saved, as_parquet])
def test_nothing_that_a_row_names_is_opened_or_downloaded(
    tmp_path: Path, listener: socket.socket, write: Callable[[pyarrow.Table, Path], Path]
) -> None:
    for number, address in enumerate(
        (f"http://127.0.0.1:{listener.getsockname()[1]}/beacon.png", str(tmp_path / "secret.png"))
    ):
        written = write(table_of(address), tmp_path / f"data{number}")
        rows = [row for _, row in Source(str(written)).rows()]
        assert rows == [{"text": text, "image": {"path": address}} for text in ("red", "blue")]
    with pytest.raises(TimeoutError):
        listener.accept()


def test_a_saved_data_set_names_no_file_outside(tmp_path: Path) -> None:
    for name in ("mine", "theirs"):
        datasets.Dataset.from_dict({"text": [name]}).save_to_disk(tmp_path / name)
    state = tmp_path / "theirs" / "state.json"
    content = json.loads(state.read_text())
    content["_data_files"] = [{"filename": "../mine/data-00000-of-00001.arrow"}]
    state.write_text(json.dumps(content))
    with pytest.raises(RecipeError, match=r"state\.json names a file outside of the folder"):
        list(Source(str(tmp_path / "theirs")).rows())
