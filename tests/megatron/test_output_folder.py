"""Output folders: one process writes each, also where its lock's file is removed meanwhile."""

import fcntl
from pathlib import Path
from typing import Any

import pytest

from lit_ft.errors import RecipeError
from lit_ft.megatron.output_folder import OutputFolder


def test_a_folder_has_one_writer_and_its_lock_leaves_nothing(tmp_path: Path) -> None:
    with OutputFolder(tmp_path / "out", {}) as out:
        with pytest.raises(RecipeError, match="is being written by another process"):
            OutputFolder(tmp_path / "out", {})
        out.text("a.txt", "a")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "a.txt").read_text() == "a"


def test_a_lock_whose_file_was_removed_meanwhile_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second process has opened the file that the first removes; a third must not lock the next file beside it."""
    first, real = OutputFolder(tmp_path / "out", {}), fcntl.flock

    def after_the_first(*arguments: Any) -> None:
        monkeypatch.setattr(fcntl, "flock", real)
        first.__exit__(RecipeError, None)
        real(*arguments)

    monkeypatch.setattr(fcntl, "flock", after_the_first)
    with OutputFolder(tmp_path / "out", {}), pytest.raises(RecipeError, match="is being written by another process"):
        OutputFolder(tmp_path / "out", {})
