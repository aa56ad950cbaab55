"""Heartbeats of the ranks of a run, exchanged through the store of their process group."""

import queue
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import TypeVar

import torch.distributed as dist

_Reply = TypeVar("_Reply")

FAILURE = "lit_callbacks/failure"
"""Key in the store for the exit code and the reason that the first failing rank gives."""
OVER = "over"
"""Last heartbeat of a rank whose run is over."""
HEARD = "heard"
"""Heartbeat of a rank that knows of a failure."""


def is_about_another_rank(error: BaseException) -> bool:
    """Whether a collective's error only means that another rank is gone or late."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and re.search("gloo/|NCCL|c10d|TCPStore", str(error)) is not None
    )


class Heartbeats:
    """Thread that writes this rank's heartbeat to the store, and reads failures and the heartbeats of other ranks.

    Only this thread uses the store: a request to a server that is stopped, or whose node is lost, never returns. Rank 0
    reads the heartbeats of all ranks, the other ranks read that of rank 0.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, poll_seconds: float, stage: int = 0) -> None:
        """Start the thread.

        Args:
            store: connection to the store of the process group that only this thread uses.
            rank: global rank of this process.
            world_size: number of ranks.
            poll_seconds: seconds between two heartbeats.
            stage: number of trainer calls before this one; each call has its own heartbeat keys.
        """
        self.rank, self.world_size = rank, world_size
        self.seen: dict[int, str] = {}
        """Last heartbeat of each rank that is read; this rank's own changes each time the store has answered."""
        self.failure: tuple[int, str] | None = None
        """Exit code and reason that the first failing rank has given."""
        self.is_store_gone = False
        self._store, self._poll_seconds, self._stage = store, poll_seconds, stage
        self.seen[rank] = "0"
        self._beat, self._is_over = 0, False
        self._requests: queue.Queue[Callable[[], None]] = queue.Queue()
        threading.Thread(target=self._run, name="heartbeats", daemon=True).start()

    def publish(self, code: int, reason: str, seconds: float, silent: Sequence[int] = ()) -> tuple[int, str]:
        """Publish a failure, unless another rank was first; returns exit code and reason of the first failure.

        Args:
            code: exit code for the other ranks.
            reason: reason of the failure, one line.
            seconds: longest wait for the store.
            silent: ranks that rank 0 does not wait for, because they give no heartbeat.
        """

        def request() -> tuple[int, str]:
            self._store.compare_set(FAILURE, "", f"{code} {reason}")
            self._exchange()
            self._wait_for_others({HEARD, OVER}, 6 * self._poll_seconds, silent)
            return self.failure or (code, reason)

        return self._ask(request, seconds) or self.failure or (code, reason)

    def silent_ranks(self, seconds: float) -> list[int]:
        """Ranks without a new heartbeat over four polls; empty if the store does not answer or a failure is known.

        Args:
            seconds: longest wait for the store, in addition to the four polls.
        """

        def request() -> list[int]:
            before = self._read_all()
            for _ in range(4):
                time.sleep(self._poll_seconds)
                self._exchange()
                if self.failure is not None:  # another rank has published the cause
                    return []
            after = self._read_all()
            return [r for r, beat in before.items() if r != self.rank and beat == after[r] != OVER]

        return self._ask(request, seconds + 4 * self._poll_seconds) or []

    def leave(self, seconds: float) -> None:
        """Publish that this rank's run is over, and end the thread.

        Args:
            seconds: longest wait for the store and, on rank 0, for the other ranks.
        """

        def request() -> bool:
            self._is_over = True
            self._store.set(self._key(self.rank), OVER)
            self._wait_for_others({OVER}, seconds)
            return True

        self._ask(request, seconds)

    def _wait_for_others(self, beats: set[str], seconds: float, silent: Sequence[int] = ()) -> None:
        """Wait on rank 0, which may hold the store: to the other ranks, its loss is a failure without a reason."""
        deadline = time.monotonic() + seconds
        while self.rank == 0 and time.monotonic() < deadline:
            if all(beat in beats for rank, beat in self._read_all().items() if rank not in (self.rank, *silent)):
                break
            time.sleep(0.02)

    def _ask(self, request: Callable[[], _Reply], seconds: float) -> _Reply | None:
        """Run a request in the thread and return its result; None if the store is gone or does not answer in time."""
        future: Future[_Reply] = Future()
        self._requests.put(partial(self._answer, request, future))
        deadline = time.monotonic() + seconds
        # Once the store is gone, the thread has ended and answers nothing.
        while not future.done() and not self.is_store_gone and time.monotonic() < deadline:
            wait([future], 0.05)
        return None if not future.done() or future.exception() else future.result()

    def _run(self) -> None:
        while not self._is_over and not self.is_store_gone:
            try:
                answer = self._requests.get(timeout=self._poll_seconds)
            except queue.Empty:
                answer = self._exchange
            try:
                answer()
            except RuntimeError:  # torch has no more specific error for a store whose server is gone
                self.is_store_gone = True

    @staticmethod
    def _answer(request: Callable[[], _Reply], future: Future[_Reply]) -> None:
        try:
            future.set_result(request())
        except RuntimeError as error:
            future.set_exception(error)
            raise

    def _exchange(self) -> None:
        self._beat += 1
        if failure := self._read(FAILURE):
            code, reason = failure.split(" ", 1)
            self.failure = int(code), reason
        self._store.set(self._key(self.rank), HEARD if failure else str(self._beat))
        if self.rank == 0:
            self.seen.update(self._read_all())
        else:
            self.seen[0] = self._read(self._key(0))
        self.seen[self.rank] = str(self._beat)

    def _read_all(self) -> dict[int, str]:
        return {rank: self._read(self._key(rank)) for rank in range(self.world_size)}

    def _read(self, key: str) -> str:
        # `get` waits for a missing key; this creates it, and does not change an existing one.
        return bytes(self._store.compare_set(key, "", "")).decode()

    def _key(self, rank: int) -> str:
        return f"lit_callbacks/heartbeat/{self._stage}/{rank}"


class Silence:
    """Time since the last new heartbeat of each rank, in seconds in which this process was running."""

    def __init__(self) -> None:
        """Start with no silent ranks."""
        self._last: dict[int, str] = {}
        self._seconds: dict[int, float] = {}

    def update(self, seen: dict[int, str], seconds: float) -> None:
        """Add the time since the last call to the silent ranks, and reset the others.

        Args:
            seen: last heartbeat of each rank.
            seconds: seconds since the last call.
        """
        for rank, beat in list(seen.items()):
            is_silent = beat == self._last.get(rank) and beat != OVER
            self._seconds[rank] = self._seconds.get(rank, 0.0) + seconds if is_silent else 0.0
            self._last[rank] = beat

    def of(self, rank: int) -> float:
        """Seconds since the last change of a rank's heartbeat."""
        return self._seconds.get(rank, 0.0)

    def longest(self) -> tuple[int, float]:
        """Rank that has been silent longest, and its seconds of silence."""
        return max(self._seconds.items(), key=lambda item: item[1], default=(0, 0.0))
