"""Worker processes: they leave signals to their parent, and end with it."""

import atexit
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import c_byte
from functools import partial
from types import FrameType
from typing import TypeVar

from torch.utils.data import DataLoader

_Batch = TypeVar("_Batch")

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def leave_signals_to_parent(is_over: c_byte, starter: int) -> None:
    """Ignore Ctrl-C, which a terminal sends to all processes, and SIGTERM, which ``timeout`` and schedulers do.

    Args:
        is_over: shared value; other than 0, it ends this process.
        starter: process that has started this one, itself or through a server of forks.
    """
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    is_from_server = multiprocessing.get_start_method() == "forkserver"
    parent = os.getppid() if is_from_server else starter
    threading.Thread(target=_end_with_parent, args=(parent, is_over), daemon=True).start()


def _end_with_parent(parent: int, is_over: c_byte) -> None:
    # A worker holds both ends of the pipe that it reads from, so it would never notice that the parent was killed, also
    # before this process could look.
    while os.getppid() == parent and not is_over.value:
        time.sleep(0.5)
    os._exit(0)  # torch takes any other code for an error


def batches_of(loader: "DataLoader[_Batch]") -> Iterator[_Batch]:
    """Batches of a loader whose worker processes leave signals to this one, which ends them."""
    if loader.num_workers == 0:
        yield from loader
        return
    is_over = multiprocessing.RawValue("b", 0)  # an Event has a lock, which a killed worker may hold
    loader.worker_init_fn = partial(_start, is_over, os.getpid())
    end = partial(setattr, is_over, "value", 1)
    try:
        with _signals_wait():  # one that interrupts the start of workers leaves some that torch does not know
            batches = iter(loader)
        atexit.register(end)  # after torch's own handlers, and so called before them: each would wait 5 s for a worker
        yield from batches
    finally:
        end()
        atexit.unregister(end)


def _start(is_over: c_byte, starter: int, _: int) -> None:
    leave_signals_to_parent(is_over, starter)


@contextmanager
def _signals_wait() -> Iterator[None]:
    """Handle signals of this block at its end; processes that it starts have them blocked."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting: list[int] = []

    def wait(number: int, _: FrameType | None) -> None:
        waiting.append(number)

    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    # Another thread may receive the signal, and the handler runs in this one.
    handlers = {number: signal.signal(number, wait) for number in _SIGNALS if signal.getsignal(number) is not None}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for received in waiting:
            signal.raise_signal(received)
