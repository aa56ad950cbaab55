"""Heartbeats of the ranks of a run, through the store that their process group was built with."""

import queue
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any

import torch.distributed as dist

FAILURE = "lit_callbacks/failure"
"""The store's key under which the first rank that fails says with which exit code the others end, and why."""
OVER = "over"
"""The last heartbeat of a rank whose run is over."""
HEARD = "heard"
"""The heartbeat of a rank that knows of a failure."""


def is_about_another_rank(error: BaseException) -> bool:
    """Whether an error of a collective only means that another rank is gone or late."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and re.search("gloo/|NCCL|c10d|TCPStore", str(error)) is not None
    )


class Heartbeats:
    """A thread that writes this rank's heartbeat to the store, and reads failures and the heartbeats of others.

    Only this thread talks to the store: a request to a server that is stopped, or whose node is lost, never returns.
    Rank 0 reads the heartbeats of all ranks, the others that of rank 0.
    """

    def __init__(self, store: Any, rank: int, world_size: int, poll_seconds: float, stage: int = 0) -> None:
        """Start the thread.

        Args:
            store: of the process group; used by this thread alone.
            rank: of this process.
            world_size: number of ranks.
            poll_seconds: between two heartbeats.
            stage: number of trainer calls before this one; each has heartbeats of its own.
        """
        self.rank, self.world_size = rank, world_size
        self.seen: dict[int, str] = {}
        """The last heartbeat of each rank that is read; this rank's own changes whenever the store has answered."""
        self.failure: tuple[int, str] | None = None
        """Exit code and reason that the first rank to fail has given."""
        self.is_store_gone = False
        self._store, self._poll_seconds, self._stage = store, poll_seconds, stage
        self.seen[rank] = "0"
        self._beat, self._is_over = 0, False
        self._requests: queue.Queue[tuple[Callable[[], Any], Future[Any]]] = queue.Queue()
        threading.Thread(target=self._run, name="heartbeats", daemon=True).start()

    def publish(self, code: int, reason: str, seconds: float, silent: Sequence[int] = ()) -> tuple[int, str]:
        """Say why the run fails, unless another rank has done so; returns what the first has said.

        Args:
            code: exit code with which the others end.
            reason: in a line.
            seconds: to wait for the store.
            silent: ranks that are not waited for until they know.
        """

        def request() -> tuple[int, str]:
            self._store.compare_set(FAILURE, "", f"{code} {reason}")
            self._exchange()
            self._wait_for_others({HEARD, OVER}, 6 * self._poll_seconds, silent)
            return self.failure or (code, reason)

        return self._ask(request, seconds) or self.failure or (code, reason)

    def silent_ranks(self, seconds: float) -> list[int]:
        """Ranks whose heartbeat stands still while this one's goes on; empty where the store does not answer.

        Args:
            seconds: to wait for the store, beside the time that it takes to watch.
        """

        def request() -> list[int]:
            before = self._read_all()
            for _ in range(4):
                time.sleep(self._poll_seconds)
                self._exchange()
                if self.failure is not None:  # somebody knows better
                    return []
            after = self._read_all()
            return [r for r, beat in before.items() if r != self.rank and beat == after[r] != OVER]

        return self._ask(request, seconds + 4 * self._poll_seconds) or []

    def leave(self, seconds: float) -> None:
        """Say that this rank's run is over, and end the thread.

        Args:
            seconds: to wait at most.
        """

        def request() -> bool:
            self._is_over = True
            self._store.set(self._key(self.rank), OVER)
            self._wait_for_others({OVER}, seconds)
            return True

        self._ask(request, seconds)

    def _wait_for_others(self, beats: set[str], seconds: float, silent: Sequence[int] = ()) -> None:
        """On rank 0, which may hold the store: to the others, a store that is gone is a failure without a reason."""
        deadline = time.monotonic() + seconds
        while self.rank == 0 and time.monotonic() < deadline:
            if all(beat in beats for rank, beat in self._read_all().items() if rank not in (self.rank, *silent)):
                break
            time.sleep(0.02)

    def _ask(self, request: Callable[[], Any], seconds: float) -> Any:
        """What the thread gets for a request; None where the store is gone or does not answer in time."""
        future: Future[Any] = Future()
        self._requests.put((request, future))
        deadline = time.monotonic() + seconds
        # Once the store is gone, the thread has ended and answers nothing.
        while not future.done() and not self.is_store_gone and time.monotonic() < deadline:
            wait([future], 0.05)
        return None if not future.done() or future.exception() else future.result()

    def _run(self) -> None:
        while not self._is_over and not self.is_store_gone:
            try:
                request, future = self._requests.get(timeout=self._poll_seconds)
            except queue.Empty:
                self._try(self._exchange)
                continue
            try:
                future.set_result(request())
            except RuntimeError as error:
                future.set_exception(error)
                self.is_store_gone = True

    def _try(self, exchange: Callable[[], None]) -> None:
        try:
            exchange()
        except RuntimeError:  # torch raises nothing more particular where a store's server has gone
            self.is_store_gone = True

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
        # `get` waits for a key that is not there; this makes it, and changes none that is.
        return bytes(self._store.compare_set(key, "", "")).decode()

    def _key(self, rank: int) -> str:
        return f"lit_callbacks/heartbeat/{self._stage}/{rank}"


class Silence:
    """For how long each rank has given no heartbeat, in seconds that this process was awake."""

    def __init__(self) -> None:
        """Start with nobody silent."""
        self._last: dict[int, str] = {}
        self._seconds: dict[int, float] = {}

    def update(self, seen: dict[int, str], seconds: float) -> None:
        """Count the time since the last call.

        Args:
            seen: the last heartbeat of each rank.
            seconds: since the last call.
        """
        for rank, beat in list(seen.items()):
            is_silent = beat == self._last.get(rank) and beat != OVER
            self._seconds[rank] = self._seconds.get(rank, 0.0) + seconds if is_silent else 0.0
            self._last[rank] = beat

    def of(self, rank: int) -> float:
        """Seconds since a rank's heartbeat has changed."""
        return self._seconds.get(rank, 0.0)

    def longest(self) -> tuple[int, float]:
        """The rank that has been silent longest, and for how many seconds."""
        return max(self._seconds.items(), key=lambda item: item[1], default=(0, 0.0))
