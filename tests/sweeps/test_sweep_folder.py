"""Folders of sweeps."""

from pathlib import Path

import pytest

from lit_ft.errors import RecipeError
from lit_ft.sweeps.sweep_folder import SWEEPS, sweep_folder, write_definition

LR, RANK = {"vary": ["optimizer.lr=1,2"]}, {"vary": ["model.peft.r=1,2"]}


def test_the_same_sweep_is_found_again_and_another_gets_its_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = sweep_folder(None, "qwen", LR)
    write_definition(first, LR)
    second = sweep_folder(None, "qwen", RANK)
    write_definition(second, RANK)
    assert first.parent == second.parent == SWEEPS / "qwen"
    assert first != second
    assert sweep_folder(None, "qwen", LR) == first
    assert sweep_folder(None, "qwen", RANK) == second
    assert sweep_folder(str(first), "qwen", LR) == first


def test_a_folder_of_another_sweep_or_with_a_damaged_file_is_refused(tmp_path: Path) -> None:
    write_definition(sweep_folder(str(tmp_path / "a"), "qwen", LR), LR)
    with pytest.raises(RecipeError, match="holds another sweep"):
        sweep_folder(str(tmp_path / "a"), "qwen", RANK)
    (tmp_path / "a" / "sweep.json").write_text("{")
    with pytest.raises(RecipeError, match=r"sweep\.json: JSONDecodeError: .*; name another folder with --sweep_dir"):
        sweep_folder(str(tmp_path / "a"), "qwen", LR)
