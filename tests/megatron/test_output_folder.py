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


@pytest.mark.parametrize(("command", "is_kept"), [({"source": "model"}, True), (None, False)])
def test_an_interruption_keeps_what_can_be_continued(
    tmp_path: Path, command: dict[str, object] | None, is_kept: bool
) -> None:
    def write(_: Path) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), OutputFolder(tmp_path / "out", command) as out:
        out.step("a.txt", write)
    assert [path.name for path in tmp_path.iterdir()] == [".out.unfinished"] * is_kept
    (tmp_path / ".out.unfinished").mkdir(exist_ok=True)
    for name, text in (("unfinished.json", "null"), ("a.txt", "a")):  # of a process that was killed
        (tmp_path / ".out.unfinished" / name).write_text(text)
    with OutputFolder(tmp_path / "out", None):
        pass
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["manifest.json"]
