"""Answers of several ranks are one file in the order of the rows; no file is overwritten."""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from ranks import on_ranks

from lit_ft import RecipeError
from lit_ft.run import predictions


def gathered(shares: list[list[int]]) -> list[Any]:
    dist.init_process_group("gloo")
    return predictions.gather([{"row": row, "answer": str(row)} for row in shares[dist.get_rank()]])


@pytest.mark.processes
@pytest.mark.parametrize("shares", [[[0, 2, 4], [1, 3]], [[0, 1, 2, 3, 4]] * 2], ids=["rows", "split model"])
def test_ranks(shares: list[list[int]]) -> None:
    assert on_ranks(2, gathered, shares) == [[{"answer": str(row)} for row in range(5)], []]


def test_answers_of_other_modules_stay_as_they_are() -> None:
    assert predictions.gather([[1.5], "text"]) == [[1.5], "text"]


def test_paths(tmp_path: Path) -> None:
    for name in ("predictions.jsonl", "predictions-2.jsonl", "predictions-3.jsonl"):
        path = predictions.free_path(tmp_path, None)
        assert path.name == name
        predictions.write(path, [{"answer": "书"}])
    assert json.loads(path.read_text(encoding="utf-8")) == {"answer": "书"}
    with pytest.raises(RecipeError, match="exists, and is not overwritten"):
        predictions.free_path(tmp_path, str(path))


@pytest.mark.parametrize(
    ("path", "problem"),
    [(__file__, "was written by another process meanwhile"), ("/proc/a.jsonl", "cannot be written")],
)
def test_answers_that_cannot_be_written_are_kept(
    path: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(RecipeError, match=rf"^{path} {problem}.*; the answers are in {tmp_path}/") as refused:
        predictions.write(Path(path), [{"answer": "书"}])
    kept = Path(str(refused.value).rpartition(" ")[2])
    assert kept.read_text(encoding="utf-8") == '{"answer": "书"}\n'
