"""Progress of a conversion in bytes, with the time left: a bar on a terminal, lines elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lit_callbacks.output.quantities import as_time
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

SECONDS_BETWEEN_LINES = 10


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show the progress of a step; yields the function that adds bytes that are done.

    Args:
        what: what is done, e.g. ``writing``.
        total: bytes of the step.
    """
    if sys.stderr.isatty():
        columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(what, total=total)
            yield lambda count: bar.advance(task, count)
        return
    began = printed = time.monotonic()
    done = 0

    def advance(count: int) -> None:
        nonlocal done, printed
        done += count
        now = time.monotonic()
        if now - printed >= SECONDS_BETWEEN_LINES and done < total:
            printed = now
            left = as_time((now - began) / done * (total - done))
            rank_zero_info(f"{what}: {done / 2**30:,.2f} of {total / 2**30:,.2f} GiB, {left} left")

    yield advance
