"""``last.ckpt``: one file, the newest, whichever callback writes it."""

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from command_line import here, recipe, run
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel

from lit_ft.checkpointing.last import LastCheckpoint


class CountsSaves(Callback):
    count = 0

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self.count += 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "steps", "names", "saves"),
    [
        (
            {},
            1,
            {"last.ckpt"},
            {True: 1, "link": 1},
        ),  # ends before the first validation, at which the other callback saves
        (
            {"every_n_train_steps": 6},
            6,
            {"last.ckpt", "epoch=1-step=6.ckpt"},
            {True: 3, "link": 2},
        ),  # after an epoch of four steps
    ],
)
@pytest.mark.parametrize("is_relative", [False, True])
@pytest.mark.parametrize("save_last", [True, "link"])
def test_two_callbacks_write_one_last_file(
    make_trainer: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    steps: int,
    names: set[str],
    saves: dict[bool | str, int],
    is_relative: bool,
    save_last: bool | Literal["link"],
) -> None:
    monkeypatch.chdir(tmp_path)
    folder, counter = Path() if is_relative else tmp_path, CountsSaves()
    callbacks = [counter, ModelCheckpoint(folder, save_last=save_last, **options), LastCheckpoint(folder)]
    size = {"limit_train_batches": 4, "max_steps": steps, "limit_val_batches": 1, "val_check_interval": 2}
    trainer = make_trainer(callbacks=callbacks, enable_checkpointing=True, **size)
    trainer.fit(BoringModel())
    assert {path.name for path in tmp_path.glob("*.ckpt")} == names
    assert torch.load(tmp_path / "last.ckpt", weights_only=False)["global_step"] == steps
    assert counter.count == saves[save_last]


class SavesACopy(Callback):
    """Saves a copy elsewhere at the end of each epoch."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.save_checkpoint(self.path)


def test_a_copy_elsewhere_is_no_checkpoint_of_the_run(make_trainer: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    saves = ModelCheckpoint(run, every_n_train_steps=2, save_last=True, save_top_k=-1)
    callbacks = [SavesACopy(tmp_path / "copy.ckpt"), saves, LastCheckpoint(run)]
    make_trainer(callbacks=callbacks, enable_checkpointing=True, limit_train_batches=5, max_steps=5).fit(BoringModel())
    assert torch.load(run / "last.ckpt", weights_only=False)["global_step"] == 5


def test_it_is_no_earlier_one_where_another_file_is_the_newest(make_trainer: Any, tmp_path: Path) -> None:
    callbacks = [ModelCheckpoint(tmp_path, every_n_train_steps=2), LastCheckpoint(tmp_path)]
    make_trainer(callbacks=callbacks, enable_checkpointing=True, limit_train_batches=1, max_steps=2).fit(BoringModel())
    steps = {path.name: torch.load(path, weights_only=False)["global_step"] for path in tmp_path.glob("*.ckpt")}
    assert steps == {"epoch=1-step=2.ckpt": 2, "last.ckpt": 2}


@pytest.mark.slow
def test_a_fast_dev_run_saves_no_checkpoint(
    tmp_path: Path, model_folder: str, write_rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = recipe(tmp_path, model_folder, write_rows(), fast_dev_run=2)
    here(monkeypatch, *arguments, "--run_dir", str(tmp_path / "run"))
    assert (tmp_path / "run" / "adapter").is_dir()
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.slow
def test_a_run_that_saved_no_checkpoint_is_not_one_to_resume(
    capsys: Any, tmp_path: Path, model_folder: str, write_rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = recipe(tmp_path, model_folder, write_rows(), max_steps=1, enable_checkpointing=False)
    arguments = [*arguments, "--run_dir", str(tmp_path / "run")]
    here(monkeypatch, *arguments)
    assert "already; it saved no checkpoint; give another --run_dir" in run(capsys, *arguments, code=2)
    refused = run(capsys, *arguments, "--ckpt_path", "last", code=2)
    assert "the run was to save none (trainer.fast_dev_run or enable_checkpointing=false)" in refused


@pytest.mark.slow
def test_a_fast_dev_run_goes_on_with_no_run(
    capsys: Any, tmp_path: Path, model_folder: str, write_rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [*recipe(tmp_path, model_folder, write_rows(), max_steps=2), "--run_dir", str(tmp_path / "run")]
    here(monkeypatch, *arguments)
    adapter = tmp_path / "run" / "adapter" / "adapter_model.safetensors"
    before = adapter.read_bytes()
    for options in (("--resume", "auto"), ("--ckpt_path", "last")):
        said = run(capsys, *arguments, "--trainer.fast_dev_run", "5", *options, code=2)
        assert f"so it goes on with no run ({options[0][2:]}={options[1]}); leave one out" in said
    assert adapter.read_bytes() == before


def test_a_run_that_was_moved_replaces_its_last_file(make_trainer: Any, tmp_path: Path) -> None:
    first, moved = tmp_path / "first", tmp_path / "moved"
    for folder, steps, checkpoint in ((first, 2, None), (moved, 6, moved / "last.ckpt")):
        callbacks = [ModelCheckpoint(folder, save_last=True), LastCheckpoint(folder)]
        trainer = make_trainer(callbacks=callbacks, enable_checkpointing=True, limit_train_batches=4, max_steps=steps)
        trainer.fit(BoringModel(), ckpt_path=checkpoint, weights_only=False)
        if folder is first:
            first.rename(moved)
    assert torch.load(moved / "last.ckpt", weights_only=False)["global_step"] == 6
    assert not list(moved.glob("last-v*"))
