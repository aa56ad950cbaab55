"""When one rank of a run fails, hangs or is lost, the others end too, and say why."""

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.distributed import distributed_c10d

from lit_callbacks.lifecycle.graceful_stop import StoppedAtOnce, StopRequested
from lit_callbacks.lifecycle.heartbeats import OVER, Heartbeats, Silence, is_about_another_rank


class RankFailureWatchdog(Callback):
    """End every rank within seconds of the first that fails, and within the timeout of one that is silent.

    A rank that waits in a collective for one that will never come waits until the process group's timeout, half an
    hour by default, and its process may outlive the run. Here the rank that fails tells the others through the store
    that the process group was built with. Ranks that can tell nothing more (stopped, killed, their node lost) are
    noticed by their heartbeat, and so is rank 0, which holds the store. What waits in a collective cannot be
    interrupted: it is given ``grace_seconds`` to fail by itself, then its process exits, and with it those that
    Lightning has started from it.
    """

    def __init__(
        self, grace_seconds: float = 5.0, poll_seconds: float = 0.5, timeout_seconds: float | None = None
    ) -> None:
        """Set the times.

        Args:
            grace_seconds: from the news of a failure elsewhere to the end of this process.
            poll_seconds: between two heartbeats.
            timeout_seconds: from a rank's last heartbeat to the end of the other processes; None is the timeout of
                the process group.
        """
        self.grace_seconds, self.poll_seconds, self.timeout_seconds = grace_seconds, poll_seconds, timeout_seconds
        self._stage = 0
        self._over: threading.Event | None = None
        self._heartbeats: Heartbeats
        self._limit = 0.0
        self._said = ""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Watch, in a run of several ranks."""
        if trainer.world_size > 1 and dist.is_available() and dist.is_initialized() and self._over is None:
            # torch has no public way to the store of a group that somebody else has made. A connection of its own,
            # because a thread that waits keeps the other one busy.
            store: Any = distributed_c10d._get_default_store()
            timeout = self.timeout_seconds or store.timeout.total_seconds()
            self._limit = max(timeout - self.grace_seconds - 4 * self.poll_seconds, timeout / 2)
            self._heartbeats = Heartbeats(
                store.clone(), trainer.global_rank, trainer.world_size, self.poll_seconds, self._stage
            )
            self._stage, self._over = self._stage + 1, threading.Event()
            threading.Thread(target=self._watch, args=(trainer, self._over), daemon=True).start()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """The run is over: other ranks may leave when they like."""
        self._rest()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Tell the other ranks, unless one of them was first or all of them stop together."""
        if self._over is None or isinstance(exception, StopRequested):
            self._rest()
            return
        self._over.set()
        self._over = None
        code, reason, silent = self._cause(trainer.global_rank, exception)
        failure = self._heartbeats.publish(code, reason, self.grace_seconds, silent)
        if not failure[1].startswith(f"rank {trainer.global_rank} "):
            self._say(trainer.global_rank, failure[1])
        # Other callbacks may save, and a traceback is yet to come; but a rank that fails must end.
        threading.Thread(target=self._end_if_stuck, args=(trainer, failure), daemon=True).start()
        atexit.register(self._end_children, trainer, self.grace_seconds)

    def _cause(self, rank: int, exception: BaseException) -> tuple[int, str, list[int]]:
        if isinstance(exception, StoppedAtOnce):
            return exception.exit_code, f"rank {rank} was {exception.reason}", []
        # The rank that is to explain_distributed_error may not be able to say so itself.
        silent = self._heartbeats.silent_ranks(self.grace_seconds) if is_about_another_rank(exception) else []
        if (news := self._news()) is not None:
            return *news, silent
        said = " ".join(f"{type(exception).__name__}: {exception}".split())
        return 1, _no_sign_of_life(silent) if silent else f"rank {rank} failed: {said}", silent

    def _rest(self) -> None:
        if self._over is not None:
            self._over.set()
            self._over = None
            self._heartbeats.leave(self.grace_seconds)

    def _watch(self, trainer: Trainer, over: threading.Event) -> None:
        rank, silence, last = trainer.global_rank, Silence(), time.monotonic()
        while not over.wait(self.poll_seconds):
            now = time.monotonic()
            # A process that was stopped itself, as by Ctrl-Z, knows nothing of the others meanwhile.
            silence.update(self._heartbeats.seen, min(now - last, max(2 * self.poll_seconds, self._limit / 4)))
            last = now
            if (failure := self._news()) is not None and not over.wait(self.grace_seconds):
                self._end(trainer, failure)
            silent, seconds = silence.longest()
            if seconds >= self._limit and failure is None:
                is_store = silence.of(rank) >= self._limit
                reason = _no_answer(seconds) if is_store else _no_sign_of_life([silent], seconds)
                self._say(rank, reason)
                self._end(trainer, self._heartbeats.publish(1, reason, 2 * self.poll_seconds, [silent]))

    def _news(self) -> tuple[int, str] | None:
        """Exit code and reason of a failure elsewhere."""
        beats = self._heartbeats
        if beats.failure is None and beats.is_store_gone and beats.seen.get(0) != OVER:
            return 1, "rank 0, which holds the store of the process group, has gone"
        return beats.failure

    def _end_if_stuck(self, trainer: Trainer, failure: tuple[int, str]) -> None:
        if not _waited(lambda: trainer.state.stage is None, self._limit):
            self._end(trainer, failure)

    def _end(self, trainer: Trainer, failure: tuple[int, str]) -> None:
        self._say(trainer.global_rank, failure[1])
        self._end_children(trainer, 2 * self.poll_seconds)
        os._exit(failure[0])

    def _say(self, rank: int, reason: str) -> None:
        if reason != self._said:
            self._said = reason
            print(f"rank {rank} stops: {reason}", file=sys.stderr, flush=True)

    @staticmethod
    def _end_children(trainer: Trainer, seconds: float) -> None:
        """End the processes that Lightning has started from this one: a stopped one would stay for ever."""
        launcher: Any = trainer.strategy.launcher
        processes = getattr(launcher, "procs", [])
        if not _waited(lambda: all(process.poll() is not None for process in processes), seconds):
            launcher.kill(signal.SIGKILL)


def _waited(until: Callable[[], bool], seconds: float) -> bool:
    """Wait until something is so; returns False where it is not within some seconds."""
    deadline = time.monotonic() + seconds
    while not until():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _no_answer(seconds: float) -> str:
    return (
        f"the store of the process group has not answered for {seconds:.0f} s: rank 0, which holds it, is stopped, or "
        "its node or the network is lost"
    )


def _no_sign_of_life(ranks: list[int], seconds: float | None = None) -> str:
    which = f"rank {ranks[0]} gives" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} give"
    since = "" if seconds is None else f" for {seconds:.0f} s"
    return f"{which} no sign of life{since}: killed, stopped, or the node or the network is lost"


FailTogether = RankFailureWatchdog
"""Its name before 0.2; it goes with that release."""
