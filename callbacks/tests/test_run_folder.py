"""Where the files of callbacks are."""

import os
from pathlib import Path

import pytest
from lightning.pytorch import Trainer
from lit_callbacks import SampleGenerations
from lit_callbacks.run_folder import run_folder
from plain_modules import Digits, digits, make_trainer


def test_it_is_the_root_folder(tmp_path: Path) -> None:
    assert run_folder(Trainer(default_root_dir=tmp_path, logger=False)) == tmp_path


def test_files_of_a_run_elsewhere_are_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    samples = SampleGenerations(["a"], generate=lambda module, prompts: prompts)
    trainer = make_trainer(
        tmp_path, default_root_dir="memory://run", callbacks=[samples], max_steps=1, enable_checkpointing=False
    )
    with pytest.warns(
        UserWarning, match=r"default_root_dir='memory://run' is not on this machine.*; give each a folder"
    ):
        trainer.fit(Digits(), digits())
    assert os.listdir(tmp_path) == ["samples.jsonl"]
