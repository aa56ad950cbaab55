"""JSON files of one object in place of rows."""

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lit_ft import RecipeError
from lit_ft.data.text.sources import Source

ROWS = [{"instruction": f"q {i}", "output": "a"} for i in range(3)]

OBJECTS: dict[str, tuple[Any, str]] = {
    "rows below a key": ({"data": ROWS}, "is one object with rows in 'data' (3); a list of rows is needed: jq .data "),
    "a version beside them": ({"version": "1", "data": ROWS}, "rows in 'data' (3)"),
    "a key that is no name": ({"my rows": ROWS}, """jq '.["my rows"]' """),
    "two lists": ({"train": ROWS, "test": ROWS[:1]}, "rows in 'train' (3) and 'test' (1)"),
    "rows by name": ({"a": ROWS[0], "b": ROWS[1], "c": ROWS[2]}, "is one object with 3 rows by name"),
    "columns": ({name: [row[name] for row in ROWS] for name in ROWS[0]}, "is one object of columns"),
    "columns by number": ({name: {str(i): row[name] for i, row in enumerate(ROWS)} for name in ROWS[0]}, "of columns"),
}


@pytest.mark.parametrize("name", OBJECTS)
@pytest.mark.parametrize("indent", [None, 1])
def test_what_is_found_and_a_command_that_rewrites_it(tmp_path: Path, name: str, indent: int | None) -> None:
    found, message = OBJECTS[name]
    path = tmp_path / "my rows.json"
    path.write_text(json.dumps(found, indent=indent))
    with pytest.raises(RecipeError) as refused:
        list(Source(str(path)).rows())
    assert message in str(refused.value)
    command = re.split(r"rows? is needed: |row a line: ", str(refused.value))[-1]
    if shutil.which(command.split()[0]) is None or (indent is not None and "pandas" in command):
        return
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # as in an activated environment
    subprocess.run(command, shell=True, check=True, env={**os.environ, "PATH": path})
    assert [row for _, row in Source(str(tmp_path / "my rows-rows.json")).rows()] == ROWS


def test_a_row_over_several_lines_and_a_packed_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(ROWS[0], indent=1))
    with pytest.raises(RecipeError, match=r"is one object over several lines; .* jq '\[.\]' "):
        list(Source(str(path)).rows())
    (tmp_path / "rows.json.gz").write_bytes(gzip.compress(json.dumps({"data": ROWS}).encode()))
    with pytest.raises(RecipeError, match="zcat .* | jq .data > "):
        list(Source(str(tmp_path / "rows.json.gz")).rows())


def test_a_list_of_data_sets(tmp_path: Path) -> None:
    path = tmp_path / "dataset_info.json"
    path.write_text(json.dumps({"mine": {"file_name": "rows.json"}}))
    with pytest.raises(
        RecipeError, match=r"LLaMA-Factory's list of data sets; name the file of one: --data.path .*rows.js"
    ):
        list(Source(str(path)).rows())


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": "a"}], "notes": [{"x": 1}]},
        {"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "b"}]},
        {"input_ids": [1, 2], "labels": [1, 2]},
        {"instruction": "a", "output": "b", "history": [["c", "d"]]},
        {"question": "a", "answer": "b"},
    ],
)
@pytest.mark.parametrize("number", [1, 2])
def test_rows_a_line_are_read(tmp_path: Path, row: Any, number: int) -> None:
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * number)
    assert [read for _, read in Source(str(tmp_path / "rows.jsonl")).rows()] == [row] * number
