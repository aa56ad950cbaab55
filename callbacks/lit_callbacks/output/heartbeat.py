"""A line at intervals about work that reports nothing by itself, such as the reading of weights."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lit_callbacks.output.quantities import as_time

SECONDS_BETWEEN_LINES = 30.0


@contextmanager
def heartbeat(work: str) -> Iterator[None]:
    """Context in which rank 0 prints every 30 s what it does and for how long; nothing if it takes less.

    Args:
        work: what is done, e.g. ``reading the weights of MODEL``.
    """
    ended, began = Event(), time.monotonic()

    def report() -> None:
        while not ended.wait(SECONDS_BETWEEN_LINES):
            rank_zero_info(f"{work}: {as_time(time.monotonic() - began)} so far")

    thread = Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
