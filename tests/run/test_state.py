"""The same command starts a run and goes on with it, whatever ended the process before."""

import csv
import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from killed_runs import fit
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lit_callbacks import AdapterMerger
from loops import Logged
from safetensors.torch import load_file
from sizes import FULL_SIZE
from torture import CASES, Life, outcome, torture, write_recipe

from lit_ft import CausalLM, TextDataModule
from lit_ft.checkpointing.selection import newest_good, position_of
from lit_ft.checkpointing.storage import replacement
from lit_ft.checkpointing.storage.checkpoint_io import AnyCheckpointIO
from lit_ft.run.folder import RUNS, RunFolder, unfinished_run
from lit_ft.run.lock import lock_run
from lit_ft.run.state import RunState, ended_by_time, finished_step
from lit_ft.training.loggers import MetricsCSV, read_rows


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recipe(tmp_path_factory.mktemp("torture"), accumulate=1, steps=12)


def killed_in(owner: Any, name: str) -> Callable[[], None]:
    """Has a process killed when it calls a method."""

    def die(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    return lambda: setattr(owner, name, die)


def killed_before_save(number: int) -> Callable[[], None]:
    """Has a process killed before it writes a checkpoint, counted from 1."""

    def prepare() -> None:
        save, left = AnyCheckpointIO.save_checkpoint, iter(range(number - 1))

        def save_or_die(*arguments: Any, **options: Any) -> None:
            if next(left, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            save(*arguments, **options)

        AnyCheckpointIO.save_checkpoint = save_or_die  # type: ignore[method-assign]

    return prepare


def steps(run: Path) -> list[int]:
    with (run / "metrics.csv").open(newline="") as file:
        return [int(row["step"]) for row in csv.DictReader(file) if row["train/loss"]]


@pytest.mark.processes
@pytest.mark.parametrize("name", ["one", "zero3", "pp2"])
def test_a_run_killed_before_its_adapter_writes_it_when_it_is_resumed(tmp_path: Path, recipe: Path, name: str) -> None:
    run, case = tmp_path / "run", CASES[name]
    options = ["--run_dir", str(run), "--resume", "auto"]
    codes, _ = fit(tmp_path, recipe, *options, case=case, prepare=killed_in(AdapterMerger, "on_train_end"))
    assert -signal.SIGKILL in codes
    assert not (run / "adapter").exists()
    assert not (run / "finished.json").exists()
    codes, said = fit(tmp_path, recipe, *options, case=case)
    assert codes == {0}, said
    checkpoint = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True) if name == "one" else None
    adapter = load_file(run / "adapter" / "adapter_model.safetensors")
    if checkpoint is not None:
        saved = checkpoint["state_dict"]["model.base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"]
        assert torch.equal(adapter["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"], saved)
    assert (run / "finished.json").exists()
    assert steps(run) == [0, 1, 2, 3]


def killed_in_the_validation_after(step: int) -> Callable[[], None]:
    def prepare() -> None:
        finish = CausalLM.on_validation_epoch_end

        def die_or_finish(module: CausalLM) -> None:
            if module.trainer.global_step == step:
                os.kill(os.getpid(), signal.SIGKILL)
            finish(module)

        CausalLM.on_validation_epoch_end = die_or_finish  # type: ignore[method-assign]

    return prepare


def validation_losses(run: Path) -> list[tuple[int, float]]:
    with (run / "metrics.csv").open(newline="") as file:
        return [(int(row["step"]), float(row["val/loss"])) for row in csv.DictReader(file) if row["val/loss"]]


@pytest.mark.processes
@pytest.mark.parametrize(
    "limit", [["--trainer.max_steps", "4"], ["--trainer.max_steps", "-1", "--trainer.max_epochs", "1"]]
)
def test_a_run_killed_in_its_last_validation_makes_up_for_it(tmp_path: Path, recipe: Path, limit: list[str]) -> None:
    options = ["--data.val_fraction", "0.2", "--trainer.val_check_interval", "2", "--trainer.limit_train_batches", "4"]
    options += ["--resume", "auto", *limit, "--run_dir"]
    assert fit(tmp_path, recipe, *options, str(tmp_path / "whole"))[0] == {0}
    wanted = validation_losses(tmp_path / "whole")
    assert [step for step, _ in wanted] == [1, 3]
    run = tmp_path / "run"
    codes, _ = fit(tmp_path, recipe, *options, str(run), prepare=killed_in_the_validation_after(4))
    assert codes == {-signal.SIGKILL}
    assert validation_losses(run) == wanted[:1]
    codes, said = fit(tmp_path, recipe, *options, str(run))
    assert codes == {0}, said
    assert validation_losses(run) == wanted
    assert steps(run) == [0, 1, 2, 3]
    assert (run / "adapter" / "adapter_model.safetensors").exists()
    codes, said = fit(tmp_path, recipe, *options, str(run))
    assert codes == {0}, said


@pytest.mark.processes
def test_a_finished_run_is_left_as_it_is_and_mended_where_its_adapter_is_gone(tmp_path: Path, recipe: Path) -> None:
    run = tmp_path / "run"
    options = ["--run_dir", str(run), "--resume", "auto"]
    assert fit(tmp_path, recipe, *options)[0] == {0}
    written = (run / "adapter" / "adapter_config.json").stat().st_mtime_ns
    assert fit(tmp_path, recipe, *options)[0] == {0}
    assert (run / "adapter" / "adapter_config.json").stat().st_mtime_ns == written
    shutil.rmtree(run / "adapter")
    codes, said = fit(tmp_path, recipe, *options)
    assert codes == {0}
    assert "nothing is left to train" in said
    assert (run / "adapter" / "adapter_model.safetensors").exists()
    assert steps(run) == [0, 1, 2, 3]


@pytest.mark.processes
def test_time_that_is_used_up_is_no_last_step(
    make_trainer: Any, model_folder: str, write_rows: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    data = write_rows()
    for resumed in (None, tmp_path / "saved.ckpt"):
        state = RunState(tmp_path / "finished.json", tmp_path)
        trainer = make_trainer(max_steps=-1, max_epochs=1000, max_time={"seconds": 1}, callbacks=[state])
        trainer.fit(CausalLM(model_folder), TextDataModule(data, micro_batch_size=2), ckpt_path=resumed)
        trainer.save_checkpoint(tmp_path / "saved.ckpt")
    assert "trainer.max_time, or the duration of a Timer, counts from the start of the run" in caplog.text
    assert f"was over at step {trainer.global_step}: nothing is trained; to go on, resume with a longer" in caplog.text
    assert "nothing is left to train" not in caplog.text
    assert ended_by_time(state.marker)
    trainer = make_trainer(max_steps=2, max_time={"minutes": 9}, callbacks=[state])
    trainer.fit(CausalLM(model_folder), TextDataModule(data))
    assert finished_step(state.marker) == 2
    assert not ended_by_time(state.marker)


@pytest.mark.slow
@pytest.mark.parametrize("saved_at", ["the end", "a step whose validation is due"])
def test_a_run_that_early_stopping_ended_trains_no_further(
    make_trainer: Any,
    model_folder: str,
    write_rows: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    saved_at: str,
) -> None:
    caplog.set_level("INFO")
    data = TextDataModule(write_rows(), val_path=write_rows(), micro_batch_size=4)
    saves = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    ends: list[dict[str, Any]] = []
    for resumed in (None, tmp_path / "saved.ckpt"):
        caplog.clear()
        stop, state = (
            EarlyStopping("val/loss", min_delta=5.0, patience=1),
            RunState(tmp_path / "finished.json", tmp_path),
        )
        trainer = make_trainer(
            max_epochs=5,
            limit_train_batches=2,
            callbacks=[stop, state, *([] if resumed else [saves])],
            enable_checkpointing=True,
        )
        trainer.fit(module := CausalLM(model_folder), data, ckpt_path=resumed)
        if resumed is None:
            trainer.save_checkpoint(tmp_path / "saved.ckpt")
            if saved_at != "the end":
                shutil.copy(tmp_path / "step=4.ckpt", tmp_path / "saved.ckpt")
        ends.append({name: weight.clone() for name, weight in module.state_dict().items()})
        assert trainer.global_step == 4
        assert stop.wait_count == 1
        assert json.loads(state.marker.read_text()) == {"global_step": 4, "ended_by": "early_stopping"}
    assert (
        "EarlyStopping ended the run at step 4: nothing is left to train; to go on, raise its patience" in caplog.text
    )
    assert all(torch.equal(weight, ends[1][name]) for name, weight in ends[0].items())


class Constant(BoringModel):
    """Module whose validation loss is the same each time."""

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val/loss", 2.0)


class ScoredByStep(BoringModel):
    """Module whose validations give the numbers of a list, one after the other."""

    def __init__(self, scores: list[float]) -> None:
        super().__init__()
        self.scores = iter(scores)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.log("val/loss", torch.tensor(next(self.scores)))


@pytest.mark.parametrize("is_copied", [False, True])
def test_a_run_that_was_moved_knows_its_best_checkpoints(make_trainer: Any, tmp_path: Path, is_copied: bool) -> None:
    """Also a copy of a run whose folder is still there; a run that begins with another's checkpoint has none."""
    first, moved, other = (tmp_path / name for name in ("first", "moved", "other"))

    def train(run: Path, scores: list[float], ckpt_path: Path | None) -> ModelCheckpoint:
        saver = ModelCheckpoint(
            run / "checkpoints", monitor="val/loss", save_top_k=2, filename="{step}", save_last=True
        )
        trainer = make_trainer(
            callbacks=[saver, RunState(run / "finished.json", run / "checkpoints")],
            enable_checkpointing=True,
            max_epochs=4 if ckpt_path else 2,
            limit_train_batches=1,
            limit_val_batches=1,
            num_sanity_val_steps=0,
        )
        run.mkdir(exist_ok=True)
        trainer.fit(ScoredByStep(scores), ckpt_path=ckpt_path, weights_only=False)
        return saver

    train(first, [0.2, 0.4], None)
    shutil.copytree(first, moved) if is_copied else first.rename(moved)
    saver = train(moved, [0.3, 0.5], moved / "checkpoints" / "last.ckpt")
    assert Path(saver.best_model_path) == moved / "checkpoints" / "step=1.ckpt"
    assert float(saver.best_model_score) == pytest.approx(0.2)
    assert {path.name for path in (moved / "checkpoints").iterdir()} == {"step=1.ckpt", "step=3.ckpt", "last.ckpt"}
    if is_copied:
        assert {path.name for path in (first / "checkpoints").iterdir()} == {"step=1.ckpt", "step=2.ckpt", "last.ckpt"}
    saver = train(other, [0.6, 0.5, 0.7], moved / "checkpoints" / "step=1.ckpt")
    assert Path(saver.best_model_path).parent == other / "checkpoints"
    assert float(saver.best_model_score) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("first", "then", "ends"),
    [
        ({"patience": 1}, {"patience": 2}, [2, 2, 3, 3]),
        ({"stopping_threshold": 3.0}, {"stopping_threshold": 1.0}, [1, 1, 4, 4]),
        ({"divergence_threshold": 1.0}, {}, [1, 1, 4, 4]),
        ({"patience": 9}, {"patience": 1}, [4, 4, 4, 4]),
    ],
)
def test_early_stopping_goes_by_the_recipe_when_a_run_is_resumed(
    make_trainer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, first: Any, then: Any, ends: list[int]
) -> None:
    """Epochs of one step, in all: at first, and resumed with the same options, with others, and with these again."""
    caplog.set_level("INFO")
    reached: list[int] = []
    for options, resumed in ((first, None), (first, "1.ckpt"), (then, "2.ckpt"), (then, "3.ckpt")):
        stop = EarlyStopping("val/loss", **options)
        callbacks = [stop, RunState(tmp_path / "finished.json", tmp_path)]
        trainer = make_trainer(max_epochs=4, limit_train_batches=1, limit_val_batches=1, callbacks=callbacks)
        trainer.fit(Constant(), ckpt_path=resumed and tmp_path / resumed, weights_only=False)
        reached.append(trainer.global_step)
        assert stop.patience == options.get("patience", 3)
        trainer.save_checkpoint(tmp_path / f"{len(reached)}.ckpt")
    assert reached == ends
    line = f"EarlyStopping: patience is {then.get('patience')}, no longer {first.get('patience')}"
    assert caplog.text.count(line) == ("patience" in first)


def test_a_resumed_run_says_how_much_time_it_has_left(
    make_trainer: Any, model_folder: str, write_rows: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    data, saved = write_rows(), tmp_path / "saved.ckpt"
    for steps_in_all, resumed in ((1, None), (2, saved)):
        assert "is left of trainer.max_time" not in caplog.text  # a run that starts has all of it
        state = RunState(tmp_path / "finished.json", tmp_path)
        trainer = make_trainer(max_steps=steps_in_all, max_time={"hours": 9}, callbacks=[state])
        trainer.fit(CausalLM(model_folder), TextDataModule(data), ckpt_path=resumed)
        trainer.save_checkpoint(saved)
    assert re.search(r"\b8:59:\d\d is left of trainer.max_time", caplog.text)


def test_a_run_that_ended_by_time_goes_on_with_more_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = RunFolder(RUNS / "recipe" / "2026-01-01_00-00-00")
    AnyCheckpointIO().save_checkpoint({"loops": {}}, run.checkpoints / "last.ckpt")
    content = {"seed_everything": 1, "model": {}, "data": {}, "trainer": {"max_time": "00:01:00:00"}}
    run.config.write_text(yaml.safe_dump(content))
    for end, goes_on in (({}, False), ({"ended_by": "max_time"}, True)):
        run.finished.write_text(json.dumps({"global_step": 3, **end}))
        for more in (None, "00:01:00:01", {"hours": 2}):
            assert (unfinished_run("recipe", more) == run) is goes_on
        for no_more in ("00:01:00:00", {"minutes": 59}):
            assert unfinished_run("recipe", no_more) is None
    run.config.write_text(yaml.safe_dump({**content, "trainer": {"max_time": None}}))  # a Timer of the recipe's own
    assert unfinished_run("recipe") is None


@pytest.mark.slow
def test_a_run_killed_before_its_first_checkpoint_starts_again_by_the_same_command(
    tmp_path: Path, recipe: Path
) -> None:
    from lightning.pytorch import Trainer

    run = tmp_path / "run"
    codes, _ = fit(tmp_path, recipe, "--run_dir", str(run), prepare=killed_in(Trainer, "save_checkpoint"))
    assert codes == {-signal.SIGKILL}
    assert (run / "config.yaml").exists()
    codes, said = fit(tmp_path, recipe, "--run_dir", str(run), "--ckpt_path", "last")
    assert codes == {2}
    assert "start it again with the same command without --ckpt_path" in said
    codes, said = fit(tmp_path, recipe, "--run_dir", str(run))
    assert codes == {0}, said
    assert steps(run) == [0, 1, 2, 3]
    assert fit(tmp_path, recipe, "--run_dir", str(run))[0] == {2}  # now there is something to lose


@pytest.mark.processes
def test_without_a_run_folder_the_newest_unfinished_run_of_the_recipe_goes_on(
    tmp_path: Path, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert fit(tmp_path, recipe, "--resume", "auto", prepare=killed_in(AdapterMerger, "on_train_end"))[0] != {0}
    (run,) = (tmp_path / "checkpoints" / "runs" / "recipe").iterdir()
    codes, said = fit(tmp_path, recipe, "--resume", "auto")
    assert codes == {0}
    assert f"resume=auto: resuming checkpoints/runs/recipe/{run.name}" in said
    assert (run / "adapter").exists()
    assert fit(tmp_path, recipe, "--resume", "auto")[0] == {0}  # all are finished: another one starts
    assert len(list((tmp_path / "checkpoints" / "runs" / "recipe").iterdir())) == 2


@pytest.mark.processes
def test_damage_is_said_and_the_checkpoint_before_it_resumed(tmp_path: Path, recipe: Path) -> None:
    run = tmp_path / "run"
    saves = ["--trainer.callbacks.save_top_k", "-1"]
    assert fit(tmp_path, recipe, "--run_dir", str(run), *saves)[0] == {0}
    wanted = outcome(run)
    for path in (run / "checkpoints").glob("*.ckpt"):
        found = position_of(path)
        assert found is not None
        if found.global_step == 4:
            path.write_bytes(path.read_bytes()[:-1000])
    codes, said = fit(tmp_path, recipe, "--run_dir", str(run), "--ckpt_path", "last", *saves)
    assert codes == {0}, said
    assert "last.ckpt is damaged and left out: it is truncated" in said
    assert "-step=2.ckpt" in said
    assert torch.equal(
        torch.cat([t.flatten() for t in outcome(run)["state_dict"].values()]),
        torch.cat([t.flatten() for t in wanted["state_dict"].values()]),
    )
    damaged = newest_good(run / "checkpoints")
    damaged.write_bytes(damaged.read_bytes()[:-1000])
    codes, said = fit(tmp_path, recipe, "--run_dir", str(run), "--ckpt_path", str(damaged))
    assert codes == {2}
    assert "cannot be used: it is truncated" in said


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kills"),
    [("one", 4), ("ddp", 3), ("fsdp folder", 3)] if FULL_SIZE else [("one", 1), ("ddp", 1), ("fsdp folder", 1)],
)
def test_kills_lose_nothing(tmp_path: Path, recipe: Path, name: str, kills: int) -> None:
    import random

    result = torture(name, kills, recipe, tmp_path / "torture", random.Random(0))
    assert result.kills == kills
    assert result.wrong == 0


@pytest.mark.processes
def test_steps_are_logged_by_their_numbers_after_several_resumptions(tmp_path: Path) -> None:
    recipe, run = write_recipe(tmp_path, accumulate=2), tmp_path / "run"
    arguments = ["fit", "--config", str(recipe), "--run_dir", str(run), "--resume", "auto", "--trainer.devices", "1"]
    # At an epoch's end (12 files), two steps later (4), and within the step after it (1, by itself).
    for number, left in enumerate([13, 5, 2]):
        life = Life(CASES["one"], arguments, tmp_path / f"log-{number}", prepare=killed_before_save(left))
        assert life.wait()
    last = Life(CASES["one"], arguments, tmp_path / "log-last")
    assert not last.wait()
    assert steps(run) == list(range(24))


# --- metrics.csv -----------------------------------------------------------------------------------------


def log(run: Path, rows: list[tuple[int, dict[str, float]]], **resumed: Any) -> None:
    logger = MetricsCSV(RunFolder(run), **resumed)
    for step, metrics in rows:
        logger.log_metrics(metrics, step=step)
        logger.save()


def rows(run: Path) -> list[tuple[str, str]]:
    with (run / "metrics.csv").open(newline="") as file:
        return [(row["step"], row["train/loss"] or row["mine"]) for row in csv.DictReader(file)]


def test_a_resumed_run_drops_the_rows_of_steps_that_it_repeats(tmp_path: Path) -> None:
    log(tmp_path, [(step, {"epoch": 0, "train/loss": float(step)}) for step in range(5)])
    log(tmp_path, [(3, {"mine": 3.5}), (4, {"mine": 4.5}), (3, {"lr-SGD": 0.1})], resumed_step=5)
    # Three steps were taken: Lightning's rows 0, 1 and 2, and what a callback logged after the third.
    log(tmp_path, [(3, {"epoch": 0, "train/loss": 9.0})], resumed_step=3)
    assert rows(tmp_path) == [("0", "0.0"), ("1", "1.0"), ("2", "2.0"), ("3", "3.5"), ("3", "9.0")]
    log(tmp_path, [(2, {"epoch": 0, "train/loss": 2.0})], resumed_step=3, unlogged={"epoch", "train/loss"})
    assert [step for step, _ in rows(tmp_path)] == ["0", "1", "3", "2"]


def test_what_a_callback_logged_of_the_resumed_step_is_kept(tmp_path: Path) -> None:
    """It measures the step before the checkpoint is written; Lightning logs the loss, and validates, after that."""
    of_step_3 = [{"mine": 7.0}, {"train/loss": 2.0}, {"mine": 8.0}]
    log(tmp_path, [(2, {"epoch": 0, **metrics}) for metrics in of_step_3])
    log(tmp_path, [(3, {"mine": 9.0})], resumed_step=3, unlogged={"epoch", "train/loss"})
    assert [row["mine"] for row in read_rows(tmp_path / "metrics.csv")] == ["7.0", "9.0"]
    log(tmp_path, [(2, {"mine": 1.0})], resumed_step=2, unlogged=frozenset())
    assert [row["mine"] for row in read_rows(tmp_path / "metrics.csv")] == ["1.0"]


class StopAfterThree(Callback):
    """Stops as Lightning's ``Timer`` does, at the end of a step, or after a validation as ``EarlyStopping`` does."""

    def __init__(self, in_validation: bool) -> None:
        self.in_validation = in_validation

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer.should_stop |= not self.in_validation and trainer.global_step == 3

    def on_validation_end(self, trainer: Any, *_: Any) -> None:
        trainer.should_stop |= self.in_validation and trainer.global_step == 3


class Steps(Logged):
    """Logger that stores the steps of which it gets a loss of training, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int | None] = []
        self.epochs = set[float]()

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        super().log_metrics(metrics, step)
        self.steps += [step] if "train/loss" in metrics else []
        self.epochs.add(metrics["epoch"])


@pytest.mark.slow
@pytest.mark.parametrize(("every", "logged"), [(2, [1, 3, 4]), (5, [4]), (0, [])])
def test_the_last_step_is_logged(
    make_trainer: Any, model_folder: str, write_rows: Any, tmp_path: Path, every: int, logged: list[int]
) -> None:
    """Whatever ``log_every_n_steps`` is, so that the last figures of console, model card and report are the same."""
    logger, state = Steps(), RunState(tmp_path / "finished", tmp_path / "checkpoints")
    trainer = make_trainer(max_steps=5, log_every_n_steps=every, logger=logger, callbacks=[state])
    trainer.fit(CausalLM(model_folder), TextDataModule(write_rows(), micro_batch_size=4))
    assert logger.steps == logged
    if logged:
        assert logger.losses["train/loss", 4] == float(trainer.callback_metrics["train/loss"])


def test_a_validation_within_a_step_is_logged_at_the_step_before(
    make_trainer: Any, model_folder: str, write_rows: Any
) -> None:
    logger = Logged()
    every = {"accumulate_grad_batches": 3, "val_check_interval": 2, "log_every_n_steps": 1}
    trainer = make_trainer(max_steps=3, logger=logger, **every)
    trainer.fit(CausalLM(model_folder), TextDataModule(write_rows(), micro_batch_size=1, val_fraction=0.2))
    # After 2, 4, 6 and 8 micro-batches: 0, 1, 2 and 2 steps, which loggers count from 0.
    assert {step for name, step in logger.losses if name == "val/loss"} == {0, 1}
    assert {step for name, step in logger.losses if name == "train/loss"} == {0, 1, 2}


@pytest.mark.slow
@pytest.mark.parametrize("in_validation", [False, True])
def test_the_last_step_of_a_run_that_a_callback_stops_is_logged_once(
    make_trainer: Any, model_folder: str, write_rows: Any, tmp_path: Path, in_validation: bool
) -> None:
    logger, state = Steps(), RunState(tmp_path / "finished", tmp_path / "checkpoints")
    callbacks = [state, StopAfterThree(in_validation)]
    trainer = make_trainer(max_epochs=1, log_every_n_steps=10, val_check_interval=1, logger=logger, callbacks=callbacks)
    trainer.fit(CausalLM(model_folder), TextDataModule(write_rows(), micro_batch_size=4, val_fraction=0.2))
    assert (logger.steps, logger.epochs) == ([2], {0})


def test_metrics_are_never_gone_and_a_cut_line_is_left_out(tmp_path: Path) -> None:
    log(tmp_path, [(0, {"epoch": 0, "train/loss": 1.0, "mine": 2.0}), (1, {"epoch": 0, "train/loss": 1.5})])
    file = tmp_path / "metrics.csv"
    with file.open("a") as handle:
        handle.write("0,2.0,")  # a kill within a write
    before = file.read_text()
    _ = MetricsCSV(RunFolder(tmp_path), resumed_step=2).experiment
    assert file.read_text() == before  # the run may yet be refused
    log(tmp_path, [(2, {"epoch": 0, "train/loss": 2.5})], resumed_step=2)
    assert rows(tmp_path) == [("0", "1.0"), ("1", "1.5"), ("2", "2.5")]


def test_a_run_that_still_runs_is_not_taken_for_an_unfinished_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("2026-01-01_00-00-00", "2026-01-01_00-00-01"):
        AnyCheckpointIO().save_checkpoint({"loops": {}}, RunFolder(RUNS / "recipe" / name).checkpoints / "last.ckpt")
    newest = RUNS / "recipe" / "2026-01-01_00-00-01"
    found = unfinished_run("recipe")
    assert found is not None
    assert found.root == newest
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        lock_run(newest)
        os.write(writer, b"!")
        signal.pause()
    try:
        os.read(reader, 1)
        found = unfinished_run("recipe")
        assert found is not None
        assert found.root.name == "2026-01-01_00-00-00"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.processes
@pytest.mark.parametrize("name", ["fsdp folder"])
def test_a_replacement_that_a_kill_interrupted_is_finished_by_the_next_fit(
    tmp_path: Path, recipe: Path, name: str
) -> None:
    run, case = tmp_path / "run", CASES[name]
    options = ["--run_dir", str(run), "--resume", "auto"]
    assert fit(tmp_path, recipe, *options, case=case)[0] == {0}
    for path in (run / "checkpoints").glob("*.ckpt"):
        path.rename(replacement.temporary_folder(path))  # killed between two renames
    codes, said = fit(tmp_path, recipe, *options, "--trainer.max_steps", "6", case=case)
    assert codes == {0}, said
    assert "was being replaced when an earlier process was killed" in said
    assert steps(run) == [0, 1, 2, 3, 4, 5]
    assert not list((run / "checkpoints").glob(".*.new"))


@pytest.mark.processes
@pytest.mark.parametrize("name", ["fsdp folder", "fsdp async"])
def test_a_link_to_the_newest_folder_of_shards_is_saved_and_resumed(tmp_path: Path, recipe: Path, name: str) -> None:
    run, case = tmp_path / "run", CASES[name]
    options = ["--run_dir", str(run), "--resume", "auto", "--trainer.callbacks.save_last", "link"]
    codes, said = fit(tmp_path, recipe, *options, case=case)
    assert codes == {0}, said
    assert (run / "checkpoints" / "last.ckpt").is_symlink()
    more = ["--trainer.max_steps", "6", "--model.lr_factors", "{lora_B: 4}"]
    codes, said = fit(tmp_path, recipe, *options, *more, case=case)
    assert codes == {2}
    assert "groups of [8] weights (no lr_factors), the recipe's groups of [4, 4] weights (lr_factors 'lora_B')" in said
    assert steps(run) == [0, 1, 2, 3]  # a refused run changes nothing
    assert finished_step(run / "finished.json") == 4
    codes, said = fit(tmp_path, recipe, *options, "--trainer.max_steps", "6", case=case)
    assert codes == {0}, said
    assert steps(run) == [0, 1, 2, 3, 4, 5]
    found = position_of((run / "checkpoints" / "last.ckpt").resolve())
    assert found is not None
    assert found.global_step == 6
