"""Watchdog that ends all ranks of a run, with the reason, when one of them fails, hangs or is lost."""

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

from lit_callbacks.internals.lightning_internals import delay_kill
from lit_callbacks.internals.torch_internals import connect_to_default_store
from lit_callbacks.lifecycle.graceful_stop import StoppedAtOnce, StopRequested
from lit_callbacks.lifecycle.heartbeats import OVER, Heartbeats, Silence, is_about_another_rank
from lit_callbacks.protocols import StartsProcesses


class RankFailureWatchdog(Callback):
    """End all ranks within seconds after one fails, and within a timeout after one stops giving heartbeats.

    A rank in a collective waits for a lost rank until the timeout of the process group, half an hour by default, and
    its process may outlive the run. With this callback, a failing rank tells the others through the store of the
    process group. Ranks that can no longer do so (stopped, killed, node lost) are detected by their missing heartbeat,
    and so is rank 0, which holds the store. A collective cannot be interrupted: a rank that waits in one has
    ``grace_seconds`` to fail by itself, then its process exits, together with the processes that Lightning has started
    from it.
    """

    def __init__(
        self, grace_seconds: float = 5.0, poll_seconds: float = 0.5, timeout_seconds: float | None = None
    ) -> None:
        """Set the intervals and the timeout.

        Args:
            grace_seconds: seconds between the notice of a failure on another rank and the exit of this process.
            poll_seconds: seconds between two heartbeats.
            timeout_seconds: seconds between a rank's last heartbeat and the exit of the other processes; None is the
                timeout of the process group.

        Raises:
            ValueError: a number is not positive.
        """
        if not (grace_seconds > 0 and poll_seconds > 0 and (timeout_seconds is None or timeout_seconds > 0)):
            raise ValueError(
                f"RankFailureWatchdog(grace_seconds={grace_seconds}, poll_seconds={poll_seconds}, "
                f"timeout_seconds={timeout_seconds}): each must be positive; leave it out for the default"
            )
        self.grace_seconds, self.poll_seconds, self.timeout_seconds = grace_seconds, poll_seconds, timeout_seconds
        self._stage = 0
        self._over: threading.Event | None = None
        self._heartbeats: Heartbeats
        self._undo_delay: Callable[[], None]
        self._limit = 0.0
        self._said = ""

    def __getstate__(self) -> dict[str, Any]:
        """State of a copy, which does not watch the run of the original."""
        of_run = ("_heartbeats", "_undo_delay")
        return {name: value for name, value in vars(self).items() if name not in of_run} | {"_over": None}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Start the heartbeats and the watchdog thread, in a run of several ranks."""
        if trainer.world_size > 1 and dist.is_available() and dist.is_initialized() and self._over is None:
            # The thread gets its own connection, because a request that waits blocks a shared one.
            store, group_timeout = connect_to_default_store()
            timeout = self.timeout_seconds or group_timeout
            self._limit = max(timeout - self.grace_seconds - 4 * self.poll_seconds, timeout / 2)
            self._heartbeats = Heartbeats(
                store, trainer.global_rank, trainer.world_size, self.poll_seconds, self._stage
            )
            self._undo_delay = delay_kill(3 * self.grace_seconds)
            self._stage, self._over = self._stage + 1, threading.Event()
            threading.Thread(target=self._watch, args=(trainer, self._over), daemon=True).start()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Publish that this rank's run is over, so that its silence is no failure."""
        self._rest()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Publish the failure, unless another rank was first or all ranks stop together.

        A failure before there is a process group, such as a port in use, ends the processes that wait for one.
        """
        if self._over is None and not (dist.is_available() and dist.is_initialized()):
            self._end_children_at_exit(trainer, self.poll_seconds)
        if self._over is None or isinstance(exception, StopRequested):
            self._rest()
            return
        self._over.set()
        self._over = None
        code, reason, silent = self._cause(trainer.global_rank, exception)
        failure = self._heartbeats.publish(code, reason, self.grace_seconds, silent)
        if not failure[1].startswith(f"rank {trainer.global_rank} "):
            self._say(trainer.global_rank, failure[1])
        # Other callbacks may still save, and the traceback is not printed yet; but a failed rank must end.
        threading.Thread(target=self._end_if_stuck, args=(trainer, failure), daemon=True).start()
        self._end_children_at_exit(trainer, self.grace_seconds)

    def _cause(self, rank: int, exception: BaseException) -> tuple[int, str, list[int]]:
        if isinstance(exception, StoppedAtOnce):
            return exception.exit_code, f"rank {rank} was {exception.reason}", []
        # The rank that caused the error may not be able to publish it.
        silent = self._heartbeats.silent_ranks(self.grace_seconds) if is_about_another_rank(exception) else []
        if (news := self._news()) is not None:
            return *news, silent
        message = " ".join(f"{type(exception).__name__}: {exception}".split())
        return 1, _no_sign_of_life(silent) if silent else f"rank {rank} failed: {message}", silent

    def _rest(self) -> None:
        if self._over is not None:
            self._over.set()
            self._over = None
            self._heartbeats.leave(self.grace_seconds)
            self._undo_delay()

    def _watch(self, trainer: Trainer, over: threading.Event) -> None:
        rank, silence, last = trainer.global_rank, Silence(), time.monotonic()
        while not over.wait(self.poll_seconds):
            now = time.monotonic()
            # A process that was stopped itself, e.g. by Ctrl-Z, has missed the heartbeats of that time.
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
        """Exit code and reason of a failure on another rank; None if there is none."""
        beats = self._heartbeats
        if beats.failure is None and beats.is_store_gone and beats.seen.get(0) != OVER:
            return 1, "rank 0, which holds the store of the process group, has gone"
        return beats.failure

    def _end_if_stuck(self, trainer: Trainer, failure: tuple[int, str]) -> None:
        if not _waited(lambda: trainer.state.stage is None, self._limit):
            self._end(trainer, failure)

    def _end(self, trainer: Trainer, failure: tuple[int, str]) -> None:
        self._say(trainer.global_rank, failure[1])
        self._end_children(trainer.strategy.launcher, 2 * self.poll_seconds)
        os._exit(failure[0])

    def _say(self, rank: int, reason: str) -> None:
        if reason != self._said:
            self._said = reason
            print(f"rank {rank} stops: {reason}", file=sys.stderr, flush=True)

    def _end_children_at_exit(self, trainer: Trainer, seconds: float) -> None:
        launcher = trainer.strategy.launcher
        if isinstance(launcher, StartsProcesses) and launcher.procs:
            # Not the trainer, which would keep the model until the process ends.
            atexit.register(self._end_children, launcher, seconds)

    @staticmethod
    def _end_children(launcher: object, seconds: float) -> None:
        """End the processes that Lightning has started from this one: a stopped one would never exit."""
        if not isinstance(launcher, StartsProcesses):
            return
        processes = launcher.procs
        if not _waited(lambda: all(process.poll() is not None for process in processes), seconds):
            launcher.kill(signal.SIGKILL)


def _waited(until: Callable[[], bool], seconds: float) -> bool:
    """Wait until a condition holds; returns False if it does not within ``seconds``."""
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
"""Former name, to be removed in release 0.2."""
