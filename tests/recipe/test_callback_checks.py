"""Monitors and file names of callbacks."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import recipe, run
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.cli import ReduceLROnPlateau

from lit_ft import CausalLM, RecipeError, TextDataModule
from lit_ft.data.text.sources import Source
from lit_ft.internals.lightning import validation_interval
from lit_ft.recipe.callback_checks import (
    LoggedMetrics,
    check_callbacks,
    check_schedule,
    first_validation,
    losses_of_sources,
    run_length,
)
from lit_ft.recipe.trainer_checks import quiet_trainer


@pytest.mark.parametrize("monitor", ["val/loss", "train/grad_norm", "val/loss/tools", "throughput/tokens_per_second"])
def test_what_is_logged_is_monitored(monitor: str) -> None:
    check_callbacks([EarlyStopping(monitor), ModelCheckpoint(monitor=monitor, filename="{step}")], LoggedMetrics(True))


@pytest.mark.parametrize(
    ("monitor", "has_validation", "message"),
    [
        ("eval_loss", True, "did you mean 'val/loss'"),
        ("loss", True, "is not logged"),
        ("val/accuracy", True, "did you mean 'val/token_accuracy'"),
        ("val/loss/tools", False, "there is no validation"),
        (
            "val_loss",
            False,
            "There are train/loss, .*train/regularization, train/expert_load_max_over_mean, train/padding_share$",
        ),
    ],
)
def test_what_is_not_logged_is_refused(monitor: str, has_validation: bool, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        check_callbacks([ModelCheckpoint(monitor=monitor)], LoggedMetrics(has_validation))


@pytest.mark.parametrize(
    ("monitor", "mode", "better"),
    [
        *[("val/loss", "max", "min"), ("val/token_accuracy", "min", "max"), ("train/loss/tools", "max", "min")],
        *[("train/cross_entropy", "max", "min"), ("val/log_prob_chosen", "min", "max")],
    ],
)
def test_the_worst_is_not_taken_for_the_best(monitor: str, mode: str, better: str) -> None:
    logged = LoggedMetrics(True, measured=("token_accuracy", "log_prob_chosen"), has_token_weights=True)
    for make in (EarlyStopping, ModelCheckpoint):
        check_callbacks([make(monitor=monitor, mode=better)], logged)
        with pytest.raises(RecipeError, match=f"the worst {monitor} for the best with mode={mode}; set mode: {better}"):
            check_callbacks([make(monitor=monitor, mode=mode)], logged)


def test_cross_entropy_is_logged_where_tokens_have_weights() -> None:
    stopping = EarlyStopping("train/cross_entropy")
    check_callbacks([stopping], LoggedMetrics(True, has_token_weights=True))
    with pytest.raises(RecipeError, match="EarlyStopping monitors 'train/cross_entropy', which is not logged"):
        check_callbacks([stopping], LoggedMetrics(True))


@pytest.mark.parametrize("monitor", ["step", "epoch"])
def test_a_position_keeps_the_newest_checkpoints(monitor: str) -> None:
    check_callbacks([ModelCheckpoint(monitor=monitor, mode="max", save_top_k=2)], LoggedMetrics(False))
    with pytest.raises(RecipeError, match="set mode: max"):
        check_callbacks([ModelCheckpoint(monitor=monitor, save_top_k=2)], LoggedMetrics(False))
    with pytest.raises(RecipeError, match="EarlyStopping monitors .*, which is not logged"):
        check_callbacks([EarlyStopping(monitor)], LoggedMetrics(False))


def test_a_validation_interval_that_is_a_time() -> None:
    trainer, stopping = quiet_trainer(val_check_interval={"minutes": 5}), EarlyStopping("val/loss")
    assert validation_interval(trainer) is None
    stopping.setup(trainer, LightningModule(), "fit")  # Lightning's own reads the interval
    assert validation_interval(quiet_trainer(val_check_interval=0.25)) == 0.25


def test_the_loss_of_a_source_that_there_is_not() -> None:
    losses = losses_of_sources(TextDataModule(val_sources=[Source("a.json"), Source("b.json", name="工具 b")]))
    assert losses == ["val/loss/a", "val/loss/工具 b"]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    for name in ("val/loss/tools", "val/loss/工具b"):
        for callback in (EarlyStopping(name), ModelCheckpoint(filename=f"x={{{name}}}", auto_insert_metric_name=False)):
            with pytest.raises(RecipeError, match=rf"{name}', which is not logged; .* val/loss/a, val/loss/工具 b"):
                check_callbacks([callback], LoggedMetrics(True, source_losses=losses))
        with pytest.raises(RecipeError, match=rf"reads '{name}', which is not logged"):
            check_schedule(ReduceLROnPlateau(optimizer, monitor=name), LoggedMetrics(True, source_losses=losses))
    check_callbacks([EarlyStopping("val/loss/工具 b")], LoggedMetrics(True, source_losses=losses))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("every", "interval", "taken", "often"), [(2, 1.0, 2, "every 2 epochs"), (None, 12, 3, "once per epoch")]
)
def test_a_schedule_reads_a_validation_loss_when_there_is_one(
    make_trainer: Any,
    model_folder: str,
    write_rows: Any,
    caplog: pytest.LogCaptureFixture,
    every: int | None,
    interval: float,
    taken: int,
    often: str,
) -> None:
    caplog.set_level("INFO", "lightning.pytorch")
    schedule: Any = partial(ReduceLROnPlateau, monitor="val/loss", patience=0)
    module = CausalLM(model_folder, lr_scheduler=schedule)
    path = write_rows(count=8)
    trainer = make_trainer(max_epochs=4, check_val_every_n_epoch=every, val_check_interval=interval)
    trainer.fit(module, TextDataModule(path, val_path=path))
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == taken
    assert f"ReduceLROnPlateau steps {often}" in caplog.text


def test_a_schedule_that_reads_no_metric() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    check_schedule(ReduceLROnPlateau(optimizer, monitor="val/loss"), LoggedMetrics(True))
    check_schedule(None, LoggedMetrics(False))
    with pytest.raises(RecipeError, match="reads 'val/loss', and there is no validation"):
        check_schedule(ReduceLROnPlateau(optimizer, monitor="val/loss"), LoggedMetrics(False))
    with pytest.raises(RecipeError, match=r"write lightning.pytorch.cli.ReduceLROnPlateau with monitor: val/loss"):
        check_schedule(torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer), LoggedMetrics(True))


def test_file_names_that_cannot_be_filled_in() -> None:
    with pytest.raises(RecipeError, match=r"filename '\{step' is no pattern \(expected '\}' before end of string\)"):
        check_callbacks([ModelCheckpoint(filename="{step")], LoggedMetrics(True))
    with pytest.raises(RecipeError, match="names 'eval_loss', which is not logged; did you mean 'val/loss'"):
        check_callbacks([ModelCheckpoint(filename="{eval_loss:.2f}")], LoggedMetrics(True))


def test_file_names() -> None:
    with pytest.raises(RecipeError, match="'loss={val/loss}' with auto_insert_metric_name: false"):
        check_callbacks([ModelCheckpoint(filename="{val/loss}")], LoggedMetrics(True))
    check_callbacks([ModelCheckpoint(filename="loss={val/loss}", auto_insert_metric_name=False)], LoggedMetrics(True))
    check_callbacks([ModelCheckpoint(filename="{epoch}-{step}"), ModelCheckpoint()], LoggedMetrics(False))


@pytest.mark.parametrize(
    ("interval", "every_n_epochs", "first"),
    [
        (1.0, 1, 10),
        (0.25, 1, 2),
        (0.01, 1, 1),
        (4, 1, 4),
        (1.0, 3, 30),
        (4, 3, 24),
        (25, None, 25),  # counted over epochs
    ],
)
def test_first_validation_of_epochs_of_ten_micro_batches(
    interval: float, every_n_epochs: int | None, first: int
) -> None:
    assert first_validation(interval, every_n_epochs, 10) == first


@pytest.mark.parametrize(
    ("max_steps", "max_epochs", "length"),
    [(1, -1, 4), (2, -1, 8), (3, -1, 10), (4, -1, 14), (-1, 2, 20), (4, 1, 10), (-1, -1, None)],
)
def test_run_length_in_epochs_of_ten_micro_batches_four_a_step(
    max_steps: int, max_epochs: int, length: int | None
) -> None:
    assert run_length(max_steps, max_epochs, batches=10, accumulate=4) == length


@pytest.mark.slow
def test_a_run_that_ends_before_its_first_validation_says_so(
    caplog: pytest.LogCaptureFixture, capsys: Any, tmp_path: Path, model_folder: str, write_rows: Any
) -> None:
    caplog.set_level("INFO", "lightning.pytorch")
    given = recipe(tmp_path, model_folder, write_rows(), max_steps=1)
    run(capsys, *given, "--run_dir", str(tmp_path / "run"), "--data.val_fraction", "0.2")
    said = "before its first validation after 9: there is none; to have one, set trainer.val_check_interval=1 or lower"
    assert said in caplog.text


@pytest.mark.slow
def test_a_checkpoint_of_the_best_that_a_short_run_never_saves_is_said_at_its_start(
    caplog: pytest.LogCaptureFixture, capsys: Any, tmp_path: Path, model_folder: str, write_rows: Any
) -> None:
    caplog.set_level("INFO", "lightning.pytorch")
    callbacks = [{"class_path": "ModelCheckpoint", "init_args": {"monitor": "val/loss"}}]
    given = recipe(tmp_path, model_folder, write_rows(), max_steps=1, enable_checkpointing=True, callbacks=callbacks)
    output = run(capsys, *given, "--run_dir", str(tmp_path / "run"), "--data.val_fraction", "0.2")
    said = "first validation after 9: there is none, and ModelCheckpoint saves no best one by 'val/loss'; to have one, "
    assert said in caplog.text
    assert "could not find the monitored key" not in output + caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("own", ["module", "callback"])
def test_own_classes_log_metrics_of_any_name(
    capsys: Any, tmp_path: Path, model_folder: str, write_rows: Any, monkeypatch: pytest.MonkeyPatch, own: str
) -> None:
    monkeypatch.setenv("LIT_FT_ALLOW_CODE", "own_classes")
    callbacks: list[dict[str, Any]] = [{"class_path": "EarlyStopping", "init_args": {"monitor": "val/own"}}]
    if own == "callback":
        callbacks.append({"class_path": "own_classes.OwnMetric"})
    given = recipe(tmp_path, model_folder, write_rows(), max_epochs=1, callbacks=callbacks)
    given += ["--model", "own_classes.OwnCausalLM"] if own == "module" else []
    run(capsys, *given, "--run_dir", str(tmp_path / "run"), "--data.val_fraction", "0.2")
    assert "val/own" in (tmp_path / "run" / "metrics.csv").read_text()
