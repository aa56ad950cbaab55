"""SIGINT and SIGTERM at every stage of a run, in one process and on several ranks."""

import os
import pickle
import signal
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from forked_ranks import Ranks
from fsspec.implementations.memory import MemoryFileSystem
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.trainer.connectors import signal_connector
from lightning.pytorch.trainer.states import TrainerFn
from lit_callbacks import GracefulStop, RankFailureWatchdog, StoppedAtOnce, StopRequested
from lit_callbacks.internals.lightning_internals import attributes_of
from lit_callbacks.lifecycle import graceful_stop
from torch import nn
from torch.utils.data import DataLoader, IterableDataset


class Plain(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).mean()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.trainer.strategy.barrier()  # as a model that is split over ranks exchanges tensors in each batch

    test_step = predict_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([torch.ones(4)] * 100)


def loader(count: int = 6) -> DataLoader:
    return DataLoader([torch.ones(4)] * count, batch_size=1)


class Signal(Callback):
    """Sends this process a signal when a hook is called for the n-th time; some ranks only."""

    def __init__(self, hook: str, call: int = 0, number: int = signal.SIGTERM, ranks: tuple[int, ...] = (0,)) -> None:
        self.left, self.number, self.ranks = call, number, ranks
        setattr(self, hook, self._hook)

    def _hook(self, trainer: Trainer, *_: Any) -> None:
        self.left -= 1
        if self.left == -1 and trainer.global_rank in self.ranks:
            os.kill(os.getpid(), self.number)


class Steps(Callback):
    """What the run did."""

    def __init__(self) -> None:
        self.validated, self.ended = 0, False

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.validated += not trainer.sanity_checking

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.ended = True


def make_trainer(folder: Path | str, *callbacks: Callback, **options: Any) -> Trainer:
    quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    quiet |= {"accelerator": "cpu", "enable_checkpointing": False, "default_root_dir": folder, "max_epochs": 2}
    return Trainer(callbacks=[GracefulStop(), *callbacks], **{**quiet, **options})


def saved_step(stop: pytest.ExceptionInfo[StopRequested]) -> int:
    return int(torch.load(stop.value.checkpoint, weights_only=True)["global_step"])


# --- SLURM ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("named", [True, False], ids=["named", "lightning's"])
def test_a_job_on_one_device_is_saved_and_requeued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    for name, value in {"NTASKS": "1", "JOB_ID": "7", "PROCID": "0", "LOCALID": "0", "NODEID": "0"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("SLURM_JOB_NAME", "fit")
    calls: list[list[str]] = []
    monkeypatch.setattr(signal_connector, "call", lambda command: calls.append(command) or 0)
    path = tmp_path / "last.ckpt" if named else tmp_path / "hpc_ckpt_1.ckpt"
    callbacks = [Signal("on_before_zero_grad", 2, signal.SIGUSR1), GracefulStop(path if named else None)]
    quiet: dict[str, Any] = {"enable_progress_bar": False, "logger": False, "enable_checkpointing": False}
    run = Trainer(callbacks=callbacks, accelerator="cpu", default_root_dir=tmp_path, max_epochs=1, **quiet)
    run.fit(Plain(), loader())
    assert calls == [["scontrol", "requeue", "7"]]
    assert list(tmp_path.iterdir()) == [path]
    assert torch.load(path, weights_only=True)["global_step"] == 3
    assert run.global_step == 6  # until SLURM ends it


# --- stages --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "hook", ["on_fit_start", "on_sanity_check_start", "on_validation_batch_start", "on_train_start"]
)
def test_before_the_first_step_it_ends_at_once(tmp_path: Path, hook: str, capfd: Any) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(StoppedAtOnce) as stop:
        make_trainer(tmp_path, Signal(hook)).fit(Plain(), loader(), loader())
    assert stop.value.code == 143
    assert "stopped at once by SIGTERM (before the first step there is nothing to save)" in capfd.readouterr().err
    assert signal.getsignal(signal.SIGTERM) == before
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("command", ["validate", "test", "predict"])
def test_without_training_it_ends_at_once(tmp_path: Path, command: str, number: int) -> None:
    before = signal.getsignal(number)
    stage = {"validate": "validation"}.get(command, command)
    with pytest.raises(StoppedAtOnce, match=str(128 + number)):
        getattr(make_trainer(tmp_path, Signal(f"on_{stage}_batch_end", 1, number)), command)(Plain(), loader())
    assert signal.getsignal(number) == before


def test_validation_and_a_step_are_finished(tmp_path: Path, capfd: Any) -> None:
    steps = Steps()
    run = make_trainer(tmp_path, Signal("on_validation_batch_start", 3), steps, val_check_interval=2)
    with pytest.raises(StopRequested) as stop:
        run.fit(Plain(), loader(), loader(2))  # two batches are the sanity check's
    assert (saved_step(stop), steps.validated) == (3, 1)
    assert "SIGTERM: finishing validation and an optimizer step, saving" in capfd.readouterr().err


def test_a_resumed_run_replaces_the_file_that_it_resumes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path("checkpoints")  # a relative path, which ModelCheckpoint spells in full
    signals, path = [Signal("on_before_zero_grad", 2)], None
    for expected in (3, 12):
        callbacks = [*signals, GracefulStop(folder / "last.ckpt"), ModelCheckpoint(folder, save_last=True)]
        trainer = Trainer(callbacks=callbacks, accelerator="cpu", max_epochs=2, logger=False, enable_progress_bar=False)
        with pytest.raises(StopRequested) if signals else nullcontext():
            trainer.fit(Plain(), loader(), ckpt_path=path, weights_only=False)
        signals, path = [], folder / "last.ckpt"
        assert torch.load(path, weights_only=False)["global_step"] == expected
    assert not list(folder.glob("last-v*"))


def test_a_folder_of_another_file_system_gets_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    for folder in ("memory://run", "memory://run/checkpoints"):
        has_own = folder != "memory://run"
        saves = [ModelCheckpoint(folder)] if has_own else []
        run = make_trainer("memory://run", Signal("on_train_batch_start", 2), *saves, enable_checkpointing=has_own)
        with pytest.raises(StopRequested) as stop:
            run.fit(Plain(), loader())
        assert stop.value.checkpoint == f"{folder}/last.ckpt"
        again = make_trainer("memory://run", *saves, enable_checkpointing=has_own)
        again.fit(Plain(), loader(), ckpt_path=stop.value.checkpoint)
        assert again.global_step == 12
    assert list(tmp_path.iterdir()) == []


def test_after_a_run_it_can_be_pickled_without_the_trainer(tmp_path: Path) -> None:
    run = make_trainer(tmp_path)
    run.fit(Plain(), DataLoader([torch.ones(4)] * 2, collate_fn=lambda rows: torch.stack(rows)))  # not picklable
    stop = next(c for c in attributes_of(run).callbacks if isinstance(c, GracefulStop))
    assert isinstance(pickle.loads(pickle.dumps(stop)), GracefulStop)


def test_of_two_in_a_run_the_first_sees_signals_and_gives_them_back(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    callbacks = [GracefulStop(tmp_path / "first.ckpt"), GracefulStop(), Signal("on_before_zero_grad", 2)]
    run = Trainer(callbacks=callbacks, accelerator="cpu", max_epochs=1, logger=False, default_root_dir=tmp_path)
    said = "GracefulStop is among the callbacks more than once, and only the first sees signals"
    with pytest.warns(UserWarning, match=said), pytest.raises(StopRequested, match=r"first\.ckpt"):
        run.fit(Plain(), loader())
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_slurm_job_of_pytorch_lightning_is_requeued_too() -> None:
    """That package has a copy of each of Lightning's classes."""
    environment = type("SLURMEnvironment", (), {"__module__": "lightning_fabric.plugins.environments.slurm"})()
    environment.auto_requeue, environment.requeue_signal = True, signal.SIGUSR1
    connector, state = SimpleNamespace(cluster_environment=environment), SimpleNamespace(fn=TrainerFn.FITTING)
    trainer: Any = SimpleNamespace(_accelerator_connector=connector, state=state)
    assert graceful_stop._requeue_signal(trainer) == signal.SIGUSR1


def test_a_signal_within_the_last_step_stops_and_one_after_it_lets_the_run_finish(tmp_path: Path, capfd: Any) -> None:
    with pytest.raises(StopRequested) as stop:
        make_trainer(tmp_path, Signal("on_before_zero_grad", 11)).fit(Plain(), loader())
    assert saved_step(stop) == 12
    for hook, call in (("on_train_epoch_end", 1), ("on_train_end", 0), ("on_fit_end", 0)):
        steps = Steps()
        make_trainer(tmp_path, Signal(hook, call), steps).fit(Plain(), loader())
        assert steps.ended
        assert "the last step is done; finishing what the run writes at its end" in capfd.readouterr().err


def test_a_second_signal_ends_at_once_unless_it_is_the_same_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    twice = [Signal("on_train_batch_start", 2), Signal("on_train_batch_start", 2)]
    with pytest.raises(StopRequested):
        make_trainer(tmp_path, *twice).fit(Plain(), loader())
    monkeypatch.setattr(graceful_stop, "SAME_SIGNAL_SECONDS", 0)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(StoppedAtOnce, match="130"):
        make_trainer(tmp_path, Signal("on_train_batch_start", 2), Signal("on_train_batch_end", 2, 2)).fit(
            Plain(), loader()
        )
    assert signal.getsignal(signal.SIGINT) == before


# --- the end of a step ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "micro_batch", "step"),
    [
        ({"accumulate_grad_batches": 4}, 1, 1),
        ({"accumulate_grad_batches": 4}, 5, 2),  # a step of two micro-batches ends the epoch
        ({"accumulate_grad_batches": 4, "limit_train_batches": 5}, 4, 2),  # Lightning steps at the limit
        ({"callbacks": GradientAccumulationScheduler({0: 2, 1: 3})}, 2, 2),
        ({"callbacks": GradientAccumulationScheduler({0: 2, 1: 3})}, 6, 4),
    ],
)
@pytest.mark.parametrize("data", ["sized", "stream"])
def test_it_stops_at_the_end_of_the_same_step(
    tmp_path: Path, options: dict[str, Any], micro_batch: int, step: int, data: str
) -> None:
    options = {"limit_train_batches": 6, **options}
    more = [options.pop("callbacks")] if "callbacks" in options else []
    batches = loader(6) if data == "sized" else DataLoader(Stream(), batch_size=1)
    run = make_trainer(tmp_path, *more, Signal("on_train_batch_start", micro_batch), **options)
    with pytest.raises(StopRequested) as stop:
        run.fit(Plain(), batches)
    assert saved_step(stop) == step


def test_a_gradient_that_goes_on_into_the_next_epoch_is_not_cut(tmp_path: Path) -> None:
    # Lightning steps at the end of an epoch; DeepSpeed, which accumulates by itself, does not.
    class Handles(Callback):
        def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
            type(trainer.strategy).handles_gradient_accumulation = property(lambda self: True)

    run = make_trainer(tmp_path, Handles(), Signal("on_train_batch_start", 4), accumulate_grad_batches=4)
    strategy, own = type(run.strategy), vars(type(run.strategy)).get("handles_gradient_accumulation")
    try:
        with pytest.raises(StopRequested) as stop:
            run.fit(Plain(), loader(5))
    finally:
        del strategy.handles_gradient_accumulation
        if own is not None:
            strategy.handles_gradient_accumulation = own
    assert saved_step(stop) == 2


def test_steps_that_lightning_does_not_count_are_saved_at_the_end_of_the_epoch(tmp_path: Path) -> None:
    class Uncounted(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:  # type: ignore[override]
            optimizer: Any = self.optimizers(use_pl_optimizer=False)
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

    run, module = make_trainer(tmp_path, Signal("on_train_batch_start", 1), max_epochs=-1), Uncounted()
    with pytest.raises(StopRequested) as stop:
        run.fit(module, loader(6))
    assert run.current_epoch == 0
    saved = torch.load(stop.value.checkpoint, weights_only=True)["state_dict"]
    assert torch.equal(saved["layer.weight"], module.layer.weight)


# --- several ranks -------------------------------------------------------------------------------


class Evaluates(Callback):
    """Collectives after training, as of answers that a split model gives; some ranks get a signal between them."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for answer in range(3):
            if answer == 1 and trainer.global_rank in self.ranks:
                os.kill(os.getpid(), signal.SIGTERM)
            trainer.strategy.reduce(torch.ones(1))


def on_ranks(folder: Path, command: str, callback: Callback, **options: Any) -> None:
    together = RankFailureWatchdog(grace_seconds=1, poll_seconds=0.1)
    run = make_trainer(folder, together, callback, **{"devices": 2, "strategy": "ddp", "max_epochs": 50, **options})
    data = [loader(), loader()] if command == "fit" else [loader()]
    getattr(run, command)(Plain(), *data)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Any]:
    made: list[Ranks] = []

    def start(*arguments: Any, **options: Any) -> Ranks:
        made.append(Ranks(tmp_path, 2, partial(on_ranks, tmp_path / "run", *arguments, **options)))
        made[0].wait([0, 1], 30)
        return made[0]

    yield start
    for ranks in made:
        ranks.kill()


SOME_RANKS = pytest.mark.parametrize("ranks", [(0,), (1,), (0, 1)], ids=["rank0", "rank1", "both"])


@pytest.mark.processes
@SOME_RANKS
def test_all_ranks_stop_after_a_signal_in_validation(started: Any, tmp_path: Path, ranks: tuple[int, ...]) -> None:
    run = started("fit", Signal("on_validation_batch_end", 2, ranks=ranks), val_check_interval=2)
    for rank in (0, 1):
        assert "StopRequested: stopped by SIGTERM; saved" in run.said_by(rank), run.output()
    assert (tmp_path / "run" / "last.ckpt").exists()


@pytest.mark.processes
@SOME_RANKS
def test_all_ranks_finish_after_a_signal_in_the_evaluation_after_training(started: Any, ranks: tuple[int, ...]) -> None:
    run = started("fit", Evaluates(ranks), max_epochs=1)
    assert run.codes == {0: 0, 1: 0}, run.output()


@pytest.mark.processes
@SOME_RANKS
@pytest.mark.parametrize("command", ["fit", "predict"])
def test_all_ranks_end_where_there_is_nothing_to_save(started: Any, command: str, ranks: tuple[int, ...]) -> None:
    hook = "on_validation_batch_start" if command == "fit" else "on_predict_batch_start"
    run = started(command, Signal(hook, 0, ranks=ranks))
    reason = "there is nothing to save"
    for rank in (0, 1):
        if rank in ranks:
            assert run.codes[rank] == 143
        else:
            assert run.codes[rank] != 0
            said = f"rank {rank} stops: rank {ranks[0]} was stopped at once by SIGTERM"
            assert said in run.said_by(rank), run.output()
            assert reason in run.said_by(rank), run.output()
