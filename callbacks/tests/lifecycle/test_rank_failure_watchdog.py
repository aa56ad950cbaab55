"""Ranks of a plain Lightning run of which one raises, hangs, is stopped or killed: the others end and name it."""

import os
import pickle
import signal
import subprocess
import time
from collections.abc import Iterator
from copy import deepcopy
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from forked_ranks import Ranks
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lit_callbacks import RankFailureWatchdog
from lit_callbacks.internals.lightning_internals import delay_kill
from lit_callbacks.lifecycle.heartbeats import OVER, Heartbeats, Silence, is_about_another_rank
from ranks import on_ranks

pytestmark = pytest.mark.processes
TIMEOUT = 9


class Trouble(Callback):
    """Does harm on one rank before the second batch; in ``hang``, another rank raises a second later."""

    def __init__(self, kind: str, rank: int, mark: Path) -> None:
        self.kind, self.rank, self.mark = kind, rank, mark

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx != 1:
            return
        if self.kind == "hang" and trainer.global_rank == 2:
            time.sleep(1)
            self.mark.touch()
            raise ValueError("bad")
        if trainer.global_rank == self.rank:
            if self.kind != "hang":
                self.mark.touch()
            if self.kind == "raise":
                raise ValueError("bad")
            if self.kind in ("stop", "kill"):
                os.kill(os.getpid(), signal.SIGSTOP if self.kind == "stop" else signal.SIGKILL)
            time.sleep(600)


def fit(trouble: Trouble | None, **options: Any) -> None:
    quiet: dict[str, Any] = {
        "logger": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
    }
    # A busy machine needs the difference between the end of silence and the timeout.
    grace = 3 if trouble and trouble.kind == "stop" else 1
    callbacks = [RankFailureWatchdog(grace_seconds=grace, poll_seconds=0.1), *([trouble] if trouble else [])]
    strategy = DDPStrategy(process_group_backend="gloo", timeout=timedelta(seconds=TIMEOUT))
    Trainer(accelerator="cpu", devices=3, strategy=strategy, callbacks=callbacks, **quiet, **options).fit(BoringModel())


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Any]:
    made: list[Ranks] = []

    def start(kind: str | None, rank: int, **options: Any) -> Ranks:
        trouble = Trouble(kind, rank, tmp_path / "mark") if kind else None
        made.append(Ranks(tmp_path, 3, partial(fit, trouble, **options)))
        deadline = time.monotonic() + 60
        while kind and not (tmp_path / "mark").exists():
            assert time.monotonic() < deadline, made[-1].output()
            time.sleep(0.02)
        return made[-1]

    yield start
    for ranks in made:
        ranks.kill()


@pytest.mark.parametrize("rank", [0, 1])
def test_all_others_end_within_the_timeout_of_a_stopped_rank(started: Any, rank: int) -> None:
    ranks = started("stop", rank)
    others = [other for other in range(3) if other != rank]
    seconds = ranks.wait(others, TIMEOUT + 20)
    assert seconds < TIMEOUT, ranks.output()  # those that wait in a collective would have raised after it
    assert [ranks.codes[other] for other in others] == [1, 1]
    for other in others:
        first = ranks.said_by(other).strip().splitlines()[0]
        names = [
            f"rank {rank} gives no sign of life",
            *["the store of the process group has not answered"] * (rank == 0),
        ]
        assert first.startswith(tuple(f"rank {other} stops: {name}" for name in names)), ranks.output()
    os.kill(ranks.processes[rank], signal.SIGCONT)  # it finds that the others have gone
    ranks.wait([rank], 20)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_is_named_by_all_others(started: Any, rank: int) -> None:
    ranks = started("kill", rank)
    others = [other for other in range(3) if other != rank]
    ranks.wait(others, 20)
    name = (
        "rank 0, which holds the store of the process group, has gone" if rank == 0 else "rank 1 gives no sign of life"
    )
    for other in others:
        assert f"rank {other} stops: {name}" in ranks.said_by(other), ranks.output()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_raises_is_named_by_all_others(started: Any, rank: int) -> None:
    ranks = started("raise", rank)
    ranks.wait([0, 1, 2], 20)
    assert ranks.said_by(rank).strip().splitlines()[0] == "ValueError: bad"
    for other in {0, 1, 2} - {rank}:
        assert f"rank {other} stops: rank {rank} failed: ValueError: bad" in ranks.said_by(other), ranks.output()


def test_a_rank_that_hangs_ends_with_one_that_fails(started: Any) -> None:
    ranks = started("hang", 0)
    ranks.wait([0, 1, 2], 20)
    assert list(ranks.codes.values()) == [1, 1, 1]
    assert "rank 0 stops: rank 2 failed: ValueError: bad" in ranks.said_by(0)


def test_ranks_that_are_done_are_not_missed(started: Any) -> None:
    ranks = started(None, 0, limit_train_batches=2, max_epochs=1)
    ranks.wait([0, 1, 2], 60)
    assert list(ranks.codes.values()) == [0, 0, 0], ranks.output()
    assert "stops" not in ranks.output()


def copies(folder: str) -> list[bool]:
    class Copy(Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            deepcopy(trainer.callbacks)

    watchdog = RankFailureWatchdog()
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    for callback in (watchdog, pickle.loads(pickle.dumps(watchdog))):
        run = Trainer(accelerator="cpu", devices=2, callbacks=[callback, Copy()], max_steps=1, **options)
        run.fit(BoringModel())
    return [pickle.loads(pickle.dumps(one))._over is None for one in (watchdog, callback)]


def test_it_can_be_copied_within_a_run_and_after_it(tmp_path: Path) -> None:
    assert on_ranks(2, copies, str(tmp_path), timeout=120) == [[True, True]] * 2


def with_children() -> tuple[Any, Any]:
    """Trainer that has started two processes, and their launcher."""
    launcher = _SubprocessScriptLauncher(LightningEnvironment(), num_processes=3, num_nodes=1)
    launcher.procs = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    return SimpleNamespace(strategy=SimpleNamespace(launcher=launcher)), launcher


def test_stopped_children_are_ended() -> None:
    _, launcher = with_children()
    launcher.procs[0].send_signal(signal.SIGSTOP)
    RankFailureWatchdog._end_children(launcher, 0.2)
    assert [process.wait(5) for process in launcher.procs] == [-signal.SIGKILL] * 2


def test_processes_that_wait_for_a_process_group_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the port of the group is in use: they would wait for half an hour, after this process has ended."""
    trainer, launcher = with_children()
    at_exit: list[Any] = []
    monkeypatch.setattr("atexit.register", lambda *call: at_exit.append(call))
    RankFailureWatchdog(poll_seconds=0.1).on_exception(trainer, BoringModel(), RuntimeError("the port is in use"))
    ((end, *arguments),) = at_exit
    end(*arguments)
    assert [process.wait(5) for process in launcher.procs] == [-signal.SIGKILL] * 2


def test_a_failed_run_without_children_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atexit.register", None)
    launcher = _SubprocessScriptLauncher(LightningEnvironment(), num_processes=1, num_nodes=1)
    for trainer in (Trainer(accelerator="cpu"), SimpleNamespace(strategy=SimpleNamespace(launcher=launcher))):
        RankFailureWatchdog().on_exception(trainer, BoringModel(), RuntimeError("out of memory"))


def test_lightning_gives_time_to_name_the_rank_before_it_kills_all() -> None:
    first, failed = subprocess.Popen(["sleep", "60"]), subprocess.Popen(["false"])
    started = time.monotonic()
    _ChildProcessObserver(first.pid, [failed], sleep_period=0.3).start()  # type: ignore[arg-type]
    delay_kill(1.0)
    assert first.wait(5) == -signal.SIGKILL
    assert time.monotonic() - started >= 1.0


# --- heartbeats ----------------------------------------------------------------------------------


def test_silence_is_counted_per_rank() -> None:
    silence = Silence()
    for beat in range(5):
        silence.update({0: str(beat), 1: "7", 2: OVER}, 0.5)
    assert silence.of(0) == 0
    assert silence.longest() == (1, 2.0)


def test_the_first_reason_holds_and_a_silent_rank_is_found() -> None:
    store = dist.HashStore()
    first, second, third = (Heartbeats(store, rank, 4, 0.02) for rank in range(3))
    assert first.silent_ranks(2) == [3]
    third.leave(2)
    assert first.silent_ranks(2) == [3]  # a rank that is over is not missed
    assert second.publish(143, "rank 1 was stopped", 2) == (143, "rank 1 was stopped")
    assert first.publish(1, "rank 0 failed", 2, [3]) == (143, "rank 1 was stopped")
    for rank in (second, first):
        rank.leave(0.1)


def test_whose_error() -> None:
    assert is_about_another_rank(RuntimeError("[/pytorch/gloo/transport/tcp/pair.cc:553] Connection closed by peer"))
    assert not is_about_another_rank(RuntimeError("the file of gloomy tales is closed"))
    assert not is_about_another_rank(ValueError("NCCL"))


@pytest.mark.parametrize("wrong", ["grace_seconds", "poll_seconds", "timeout_seconds"])
def test_times_that_are_not_positive_are_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match=f"{wrong}=0.*each must be positive"):
        RankFailureWatchdog(**{wrong: 0})
