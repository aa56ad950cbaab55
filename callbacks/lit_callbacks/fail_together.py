"""When one rank of a run fails, the others end too, and say why."""

import os
import sys
import threading
from contextlib import suppress
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.distributed import distributed_c10d

from lit_callbacks.graceful_stop import StopRequested

FAILURE = "lit_callbacks/failure"
"""The key of the process group's store under which the first rank that fails says what happened."""


class FailTogether(Callback):
    """End every rank within seconds of the first that fails.

    A rank that waits in a collective for one that will never come waits until the process group's timeout, half an
    hour by default, and its process may outlive the run. Here the rank that fails tells the others through the store
    that the process group was built with; each has a thread that looks there. What waits in a collective cannot be
    interrupted: it is given ``grace_seconds`` to fail by itself, then its process exits with code 1.
    """

    def __init__(self, grace_seconds: float = 5.0, poll_seconds: float = 0.5) -> None:
        """Say how patient the ranks are.

        Args:
            grace_seconds: from the news of a failure elsewhere to the end of this process.
            poll_seconds: between two looks.
        """
        self.grace_seconds, self.poll_seconds = grace_seconds, poll_seconds
        self._over: threading.Event | None = None
        self._store: Any = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Watch, in a run of several ranks."""
        if trainer.world_size > 1 and dist.is_available() and dist.is_initialized() and self._over is None:
            # torch has no public way to the store of a group that somebody else has made. A connection of its own,
            # because a thread that waits keeps the other one busy.
            store: Any = distributed_c10d._get_default_store()
            self._store = store.clone()
            self._over = threading.Event()
            threading.Thread(target=self._watch, args=(trainer.global_rank, self._over), daemon=True).start()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """The run is over: other ranks may leave when they like."""
        self._rest()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Tell the other ranks, unless one of them was first or all of them stop together."""
        if self._over is not None and not isinstance(exception, StopRequested):
            reason = f"rank {trainer.global_rank} failed: " + " ".join(
                f"{type(exception).__name__}: {exception}".split()
            )
            # Where the rank that holds the store has gone, nobody is left to tell.
            with suppress(RuntimeError):
                first = self._store.compare_set(FAILURE, "", reason).decode()
                if first != reason:
                    _say(trainer.global_rank, first)
        self._rest()

    def _rest(self) -> None:
        if self._over is not None:
            self._over.set()
            self._over = None

    def _watch(self, rank: int, over: threading.Event) -> None:
        while not over.wait(self.poll_seconds):
            if (reason := self._failure()) is not None and not over.wait(self.grace_seconds):
                _say(rank, reason)
                os._exit(1)

    def _failure(self) -> str | None:
        try:
            return self._store.get(FAILURE).decode() if self._store.check([FAILURE]) else None
        except RuntimeError:
            return "rank 0, which holds the store of the process group, has gone"


def _say(rank: int, reason: str) -> None:
    print(f"rank {rank} stops: {reason}", file=sys.stderr, flush=True)
