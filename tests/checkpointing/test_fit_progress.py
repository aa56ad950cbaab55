"""What the Trainer's options train on, and that a run stopped at any moment equals one that was not stopped."""

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule
from loops import Outcome, Run, Stop, Stopped, plain_losses
from model_folders import shallow
from ranks import LiveRanks, on_ranks
from shared_fixtures import make_rows
from torch.utils.data import DataLoader

from lit_ft import CausalLM, RecipeError
from lit_ft.strategies import FSDPStrategy, ModelParallelStrategy

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def one_layer(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return shallow(Path(model_folder), tmp_path_factory.mktemp("models") / "one-layer", layers=1)


@pytest.fixture
def make_run(tmp_path: Path, one_layer: str) -> Callable[..., Run]:
    def make(counts: tuple[int, ...] = (21,), **options: Any) -> Run:
        sources = []
        for number, count in enumerate(counts):
            path = tmp_path / f"rows{number}.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in make_rows(count, seed=number)))
            sources.append((str(path), count))
        val_path = tmp_path / "val.json"
        val_path.write_text(json.dumps(make_rows(9, seed=9)))
        return Run(**{"model": one_layer, "sources": sources, "val_path": str(val_path), **options})

    return make


_WHOLE: dict[str, Outcome] = {}


def whole_run(run: Run, folder: Path) -> Outcome:
    """The run that is not stopped; equal ones are run once."""
    key = repr((run.ranks, run.strategy, run.data, run.trainer, run.schedule, [count for _, count in run.sources]))
    if key not in _WHOLE:
        _WHOLE[key] = run.fit(folder / "whole")
    return _WHOLE[key]


def assert_equals_the_plain_loop(
    run: Run, folder: Path, losses: dict[int, float], weights: dict[str, torch.Tensor]
) -> None:
    got = whole_run(run, folder)
    assert got.losses == pytest.approx(losses, rel=1e-5)
    for name, tensor in got.weights.items():
        torch.testing.assert_close(tensor, weights[name], atol=2e-6, rtol=1e-4, msg=name)


def assert_resumed_equals(run: Run, folder: Path, moment: str, number: float, **trainer: Any) -> None:
    whole = whole_run(run, folder)
    path = folder / f"{moment}{number}.ckpt"
    before = run.fit(folder / "stopped", Stop(moment, number, path), **trainer)
    after = run.fit(folder / "resumed", ckpt_path=str(path))
    assert (after.epoch, after.step) == (whole.epoch, whole.step)
    for name, tensor in whole.weights.items():
        assert torch.equal(after.weights[name], tensor), name
    assert before.losses | after.losses == whole.losses
    assert before.norms | after.norms == whole.norms
    assert after.logged.items() <= whole.logged.items()
    if len(before.validations) + len(after.validations) > len(whole.validations):
        assert moment in ("should_stop", "max_time")  # where training ends, Lightning validates once more
        before.validations.pop()
    assert before.validations + after.validations == whole.validations


# 21 rows in micro-batches of 2: 11 of them, in windows of 4, 4 and 3; validation after 3, 6 and 9, all of them but one
# within a window.
WINDOWS = {"max_epochs": 2, "accumulate_grad_batches": 4, "val_check_interval": 3}
SEPARATE = {"join_micro_batches": False}  # no micro-batch is empty, so that each that is lost makes a difference


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        *(("validation", number) for number in (1, 2, 5)),
        *(("batch", number) for number in (1, 3, 7, 11)),
        *(("backward", number) for number in (1, 6, 8, 14)),
        ("validation_batch", 1),
        *(("should_stop", number) for number in (6, 8, 13)),
    ],
)
def test_a_run_saved_within_an_optimizer_step_goes_on_as_if_it_had_not_stopped(
    make_run: Any, tmp_path: Path, moment: str, number: int
) -> None:
    assert_resumed_equals(make_run(trainer=WINDOWS, data=SEPARATE), tmp_path, moment, number)


def test_a_run_that_is_saved_again_right_after_it_was_resumed_goes_on_as_if_it_had_not_stopped(
    make_run: Any, tmp_path: Path
) -> None:
    run, first, second = make_run(trainer=WINDOWS, data=SEPARATE), tmp_path / "first.ckpt", tmp_path / "second.ckpt"
    whole = whole_run(run, tmp_path)
    run.fit(tmp_path, Stop("batch", 8, first))
    run.fit(tmp_path, Stop("batch", 1, second), ckpt_path=str(first))  # as every_n_train_steps does, within a window
    after = run.fit(tmp_path, ckpt_path=str(second))
    assert after.losses == {step: loss for step, loss in whole.losses.items() if step > 2}
    for name, tensor in whole.weights.items():
        assert torch.equal(after.weights[name], tensor), name


@pytest.mark.parametrize(("interval", "number"), [(4, 4), (4, 12), (0.37, 8), (1.0, 11)])
@pytest.mark.parametrize("streaming", [False, True])
def test_a_validation_that_was_due_where_a_run_was_saved_is_made_up_for(
    make_run: Any, tmp_path: Path, interval: float, number: int, streaming: bool
) -> None:
    options = {"max_epochs": 2, "accumulate_grad_batches": 4, "val_check_interval": interval}
    if streaming and interval == 0.37:
        options["limit_train_batches"] = 8
    run = make_run(trainer=options, data={"streaming": streaming})
    assert_resumed_equals(run, tmp_path, "batch", number)
    if number in (4, 12):
        assert_resumed_equals(run, tmp_path, "validation_batch", 2)


@pytest.mark.parametrize(("moment", "number"), [("batch", 4), ("validation_batch", 2)])
def test_a_validation_after_the_last_step_is_made_up_for(
    make_run: Any, tmp_path: Path, moment: str, number: int
) -> None:
    run = make_run(trainer={"max_steps": 2, "accumulate_grad_batches": 2, "val_check_interval": 4})
    path = tmp_path / "stopped.ckpt"
    assert run.fit(tmp_path, Stop(moment, number, path)).validations == []
    resumed, whole = run.fit(tmp_path, ckpt_path=str(path)), whole_run(run, tmp_path)
    assert [step for step, _ in whole.validations] == [2]
    assert resumed.validations == whole.validations
    assert resumed.logged.items() <= whole.logged.items()
    assert (resumed.step, resumed.losses) == (2, {})


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("max_steps", [-1, 12])
@pytest.mark.parametrize("moment", ["batch", "should_stop", "validation"])
def test_no_epoch_is_lost_where_a_run_was_saved_at_the_end_of_one(
    make_run: Any, tmp_path: Path, streaming: bool, max_steps: int, moment: str
) -> None:
    # 11 micro-batches an epoch.
    options = {"max_epochs": 3, "max_steps": max_steps, "check_val_every_n_epoch": 1 if moment == "validation" else 2}
    run = make_run(trainer=options, schedule={0: 4, 1: 2}, data={"streaming": streaming})
    assert_resumed_equals(run, tmp_path, moment, 1 if moment == "validation" else 11)


@pytest.mark.processes
@pytest.mark.xdist_group("progress")
@pytest.mark.parametrize("streaming", [False, True])
def test_two_ranks_go_on_from_within_an_optimizer_step(
    make_run: Any, tmp_path: Path, live_ranks: LiveRanks, streaming: bool
) -> None:
    options = {"max_epochs": 2, "accumulate_grad_batches": 4, "val_check_interval": 2}
    run = make_run(trainer=options, ranks=2, data={"streaming": streaming, "shuffle_buffer": 9})

    live_ranks(2, assert_resumed_equals, run, tmp_path, "validation", 1)
    live_ranks(2, assert_resumed_equals, run, tmp_path, "backward", 7)


@pytest.mark.processes
@pytest.mark.xdist_group("progress")
@pytest.mark.parametrize(
    "strategy", [FSDPStrategy, partial(ModelParallelStrategy, pipeline_parallel_size=2)], ids=["fsdp", "pp2"]
)
def test_a_split_model_goes_on_from_within_an_optimizer_step(
    make_run: Any, tmp_path: Path, live_ranks: LiveRanks, model_folder: str, strategy: Any
) -> None:
    run = make_run(model=model_folder, trainer=WINDOWS, ranks=2, strategy=strategy)

    live_ranks(2, assert_resumed_equals, run, tmp_path, "validation", 1)
    live_ranks(2, assert_resumed_equals, run, tmp_path, "batch", 7)


@pytest.mark.processes
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_that_max_time_has_stopped_goes_on_as_if_it_had_not(make_run: Any, tmp_path: Path, ranks: int) -> None:
    # Of 22 micro-batches of a tenth of a second the limit allows at most ten; how many of a window's four is chance.
    run = make_run(trainer=WINDOWS, ranks=ranks, data={"micro_batch_size": 2 // ranks})
    limit = {"max_time": timedelta(seconds=1)}

    def compare() -> None:
        assert_resumed_equals(run, tmp_path, "max_time", 0.1, **limit)
        path = tmp_path / "max_time0.1.ckpt"
        again = run.fit(tmp_path, ckpt_path=str(path), **limit)  # the time is that of the whole run
        assert again.losses == {}
        assert 0 <= again.step < whole_run(run, tmp_path).step

    on_ranks(ranks, compare)


def test_weights_in_double_precision_are_not_rounded_when_they_are_read(make_run: Any, tmp_path: Path) -> None:
    """Lightning reads a checkpoint before it converts the model."""
    assert_resumed_equals(make_run(trainer={"max_epochs": 1, "precision": "64-true"}), tmp_path, "batch", 3)


def test_data_that_cannot_go_back_is_warned_of(
    make_trainer: Any, model_folder: str, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    class Padded(LightningDataModule):
        def train_dataloader(self) -> Any:
            ids = torch.arange(3, 99).reshape(8, 12)
            return DataLoader([{"input_ids": row, "labels": row} for row in ids], batch_size=2)

    path = tmp_path / "within.ckpt"
    options = {"max_epochs": 1, "accumulate_grad_batches": 2}
    with pytest.raises(Stopped):
        make_trainer(**options, callbacks=[Stop("batch", 1, path)]).fit(CausalLM(model_folder), Padded())
    make_trainer(**options).fit(CausalLM(model_folder), Padded(), ckpt_path=str(path))
    warned = " ".join(str(warning.message) for warning in recwarn)
    assert "written 1 micro-batches into an optimizer step of 2, and their gradient is lost: Padded cannot" in warned


def test_several_validation_loaders_are_refused(make_trainer: Any, model_folder: str) -> None:
    class Two(LightningDataModule):
        def val_dataloader(self) -> Any:
            rows = [{"input_ids": row, "labels": row} for row in torch.arange(3, 27).reshape(2, 12)]
            return [DataLoader(rows), DataLoader(rows)]

    with pytest.raises(RuntimeError, match="multiple `val_dataloader`, but no `dataloader_idx`"):
        make_trainer().validate(CausalLM(model_folder), Two(), verbose=False)


# --- what Lightning's options train on -------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"accumulate_grad_batches": 2},
    "limit of micro-batches": {"limit_train_batches": 6, "accumulate_grad_batches": 2},
    "limit within a step": {"limit_train_batches": 7, "accumulate_grad_batches": 4},
    "share": {"limit_train_batches": 0.5, "accumulate_grad_batches": 2},
    "share within a step": {"limit_train_batches": 0.5, "accumulate_grad_batches": 4},
    "reloaded": {"reload_dataloaders_every_n_epochs": 1, "accumulate_grad_batches": 2},
    "reloaded every second": {"reload_dataloaders_every_n_epochs": 2, "limit_train_batches": 6},
    "overfit": {"overfit_batches": 2, "accumulate_grad_batches": 2},
    "overfit one": {"overfit_batches": 1},
    "overfit share": {"overfit_batches": 0.4, "accumulate_grad_batches": 2},
    "steps": {"max_steps": 5, "accumulate_grad_batches": 4},
    "validation by steps": {"val_check_interval": 5, "check_val_every_n_epoch": None, "accumulate_grad_batches": 2},
    "validation by time": {"val_check_interval": {"hours": 1}, "accumulate_grad_batches": 2},
    "validation every second epoch": {"check_val_every_n_epoch": 2, "accumulate_grad_batches": 2},
    "validation by share": {"val_check_interval": 0.3, "limit_val_batches": 1, "accumulate_grad_batches": 2},
}
ACCUMULATION: dict[str, tuple[dict[str, Any], dict[int, int]]] = {
    "accumulation from the start": ({}, {0: 4}),
    "accumulation later": ({}, {1: 2, 2: 4}),
    "cut and scheduled": ({"limit_train_batches": 8}, {1: 2, 2: 4}),
}
SETTINGS = {**{name: (options, None) for name, options in OPTIONS.items()}, **ACCUMULATION}
"""Options of the Trainer, and a schedule of accumulation by epoch."""
ON_SIZED_ONLY = [name for name in SETTINGS if "share" in name or name == "limit within a step"]
"""Refused for streams: by Lightning, or because an optimizer step would be cut."""


def epochs_of(options: dict[str, Any], schedule: dict[int, int] | None) -> int:
    """Epochs in which an option shows all that it does: a third where it names that, or changes every second epoch."""
    return 3 if schedule or "reload_dataloaders_every_n_epochs" in options else 2


CASES_OF_DATA = [
    pytest.param(streaming, *SETTINGS[name], id=f"{'streamed' if streaming else 'sized'}-{name}")
    for name in SETTINGS
    for streaming in ([False] if name in ON_SIZED_ONLY else [False, True])
]


@pytest.mark.parametrize(("streaming", "options", "schedule"), CASES_OF_DATA)
def test_under_each_option_the_right_samples_train_and_a_resumed_run_equals_one_that_did_not_stop(
    make_run: Any, tmp_path: Path, streaming: bool, options: Any, schedule: Any
) -> None:
    data, epochs = {"streaming": streaming, "shuffle_buffer": 9}, epochs_of(options, schedule)
    run = make_run((13, 8), data=data, trainer={"max_epochs": epochs, **options}, schedule=schedule)
    assert_equals_the_plain_loop(run, tmp_path, *plain_losses(run, epochs))
    assert_resumed_equals(run, tmp_path, "batch", 1 if "overfit_batches" in options else 7)


def compare(run: Run, folder: Path, losses: dict[int, float], weights: dict[str, torch.Tensor], number: int) -> None:
    assert_equals_the_plain_loop(run, folder, losses, weights)
    assert_resumed_equals(run, folder, "batch", number)


@pytest.mark.processes
@pytest.mark.xdist_group("progress")
@pytest.mark.parametrize(("streaming", "options", "schedule"), CASES_OF_DATA)
def test_under_each_option_two_ranks_do_the_same(
    make_run: Any, tmp_path: Path, live_ranks: LiveRanks, streaming: bool, options: Any, schedule: Any
) -> None:
    # Half the micro-batch: a rank has as many of them in an epoch as one process has.
    data, epochs = {"streaming": streaming, "shuffle_buffer": 9, "micro_batch_size": 1}, epochs_of(options, schedule)
    run = make_run((13, 8), data=data, trainer={"max_epochs": epochs, **options}, schedule=schedule, ranks=2)
    live_ranks(2, compare, run, tmp_path, *plain_losses(run, epochs), 1 if "overfit_batches" in options else 7)


# --- resumed on other data -------------------------------------------------------------------------


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_length": 24}, "data.max_length was 64 and is 24"),
        ({"packing": 64}, "data.packing was null and is 64"),
        ({"shuffle": False}, "data.shuffle was True and is False"),
        ({"mixing": "all_exhausted"}, r"data.mixing was \('concatenate', None\) and is \('all_exhausted'"),
        ({"seed": 4}, "seed_everything was 3 and is 4"),
        ({"rows": True}, "source 1 was 13 samples.* and is 13 samples|source 1 was .* bytes .* and is .* bytes"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_run_is_not_resumed_on_other_data_unless_told_to(
    make_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streaming: bool, options: Any, message: str
) -> None:
    data = {"streaming": streaming, "shuffle_buffer": 9}
    trainer = {"max_epochs": 2, "accumulate_grad_batches": 2}
    run = make_run((13, 8), data=data, trainer=trainer)
    path = tmp_path / "stopped.ckpt"
    run.fit(tmp_path, Stop("batch", 3, path))
    if options.get("seed"):
        monkeypatch.setattr("loops.SEED", 4)
    if options.get("rows"):
        Path(run.sources[0][0]).write_text("".join(json.dumps(row) + "\n" for row in make_rows(13, seed=5)))
    changed = replace(run, data={**data, **{k: v for k, v in options.items() if k not in ("seed", "rows")}})
    with pytest.raises(RecipeError, match=message):
        changed.fit(tmp_path, ckpt_path=str(path))
    resumed = changed.fit(tmp_path, ckpt_path=str(path), resume_data="changed")
    assert resumed.epoch == 2
    fresh = changed.fit(tmp_path)
    assert len(resumed.losses) == len(fresh.losses)  # the first epoch has begun again, all of it


def test_what_does_not_change_the_order_may_change(make_run: Any, tmp_path: Path) -> None:
    trainer = {"max_epochs": 2, "accumulate_grad_batches": 2}
    run = make_run(trainer=trainer)
    path = tmp_path / "stopped.ckpt"
    whole = run.fit(tmp_path)
    run.fit(tmp_path, Stop("batch", 3, path))
    moved = tmp_path / "moved.jsonl"
    Path(run.sources[0][0]).rename(moved)
    options = {"micro_batch_size": 4, "join_micro_batches": False, "tokenize_workers": 1, "max_length": 60}
    options |= {"cache_dir": str(tmp_path / "cache"), "num_workers": 1, "overlong": "error"}
    other = replace(run, sources=[(str(moved), 21)], data=options, trainer={**trainer, "accumulate_grad_batches": 1})
    resumed = other.fit(tmp_path, ckpt_path=str(path))
    assert resumed.losses == pytest.approx({step: whole.losses[step] for step in resumed.losses}, rel=1e-5)
    assert min(resumed.losses) == 2


def test_a_checkpoint_that_does_not_know_its_data_is_said_to_be_one(
    make_run: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = make_run(trainer={"max_epochs": 1})
    path = tmp_path / "stopped.ckpt"
    run.fit(tmp_path, Stop("batch", 3, path))
    checkpoint = torch.load(path, weights_only=True)
    del checkpoint["TextDataModule"]["order"]
    torch.save(checkpoint, path)
    caplog.set_level("INFO", "lightning.pytorch")
    run.fit(tmp_path, ckpt_path=str(path))
    assert "the checkpoint does not say what data it was written on" in caplog.text
