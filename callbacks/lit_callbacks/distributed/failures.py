"""Errors of one rank that all ranks raise."""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager

from torch import distributed as dist


@contextmanager
def failing_together(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Context in which what one rank raises is raised on all, so that none waits for it or goes on alone; a collective.

    A rank that raises nothing itself raises the error of the first rank that does. Collectives within the context are
    only those that raise on all ranks or on none.

    Args:
        group: process group of the ranks; None is that of all. Without process groups nothing is exchanged.
    """
    own: Exception | None = None
    try:
        yield
    except Exception as error:
        own = error
    failures: list[Exception | None] = [None]
    if dist.is_initialized():
        failures *= dist.get_world_size(group)
        dist.all_gather_object(failures, own and _sendable(own), group=group)
    if (first := own or next(filter(None, failures), None)) is not None:
        raise first


def _sendable(error: Exception) -> Exception:
    """The error itself, or its text if it cannot be sent to another process."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
