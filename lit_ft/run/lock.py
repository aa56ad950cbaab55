"""Lock of a run folder: one process writes to it; the kernel releases the lock when that process ends in any way."""

import fcntl
import json
import os
import socket
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import IO

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lit_ft.errors import RecipeError

LOCK = ".lock"
"""Name of the locked file in a run folder."""
LOCK_TRIES = 4
LOCK_WAIT_SECONDS = 0.05
_held: dict[Path, IO[str]] = {}


def lock_run(root: Path) -> None:
    """Lock a run folder until this process ends or ``release_runs`` is called.

    The lock is a record lock on the file ``.lock``: processes that are forked from this one do not inherit it.

    Args:
        root: existing folder of the run.

    Raises:
        RecipeError: another process holds the lock, or the folder is not writable.
    """
    path = root.resolve() / LOCK
    if path in _held:
        return
    # Not in a `with`: closing the file releases the lock.
    try:
        file = path.open("a+", encoding="utf-8")
    except OSError as error:
        raise unwritable(root, error) from error
    try:
        _lock(file)
    except (BlockingIOError, PermissionError) as error:
        holder = _holder(file)
        file.close()
        raise RecipeError(
            f"run_dir={str(root)!r} is in use by {holder}; wait until it ends or stop it, or give another --run_dir"
        ) from error
    except OSError as error:
        file.close()
        rank_zero_info(
            f"{root} lies on a file system without locks ({error.strerror}): a second run in it would not be noticed"
        )
        return
    file.truncate(0)
    json.dump({"host": socket.gethostname(), "pid": os.getpid(), "start": f"{datetime.now():%F %T}"}, file)
    file.flush()
    _held[path] = file


def unwritable(root: Path, error: OSError) -> RecipeError:
    """Error of a run folder that is not writable."""
    return RecipeError(
        f"run_dir={str(root)!r} cannot be written ({error.strerror}); give another one with --run_dir DIR"
    )


def _lock(file: IO[str]) -> None:
    """Lock a file; ``is_running`` of another process, which looks whether it is locked, holds it for a moment."""
    for _ in range(LOCK_TRIES - 1):
        with suppress(BlockingIOError, PermissionError):
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(LOCK_WAIT_SECONDS)
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def check_still_there(root: Path) -> None:
    """Check that a run folder is still the one that this process has locked; a folder that it has not locked passes.

    Args:
        root: folder of the run.

    Raises:
        RecipeError: the folder was removed or replaced.
    """
    path = root.resolve() / LOCK
    if (file := _held.get(path)) is None:
        return
    # The inode number of an open file is not reused, so the lock file of a new folder always differs from this one.
    if not path.exists() or not os.path.samestat(os.fstat(file.fileno()), path.stat()):
        raise RecipeError(
            f"run_dir={str(root)!r} was removed or replaced while the run ran ({path.name} is not the run's own): what "
            "it held is gone, so the run ends; put it back and resume with --ckpt_path last, or start again"
        )


def release_runs() -> None:
    """Release the locks of all run folders that this process holds."""
    while _held:
        _held.popitem()[1].close()


def is_running(root: Path) -> bool:
    """Whether another process holds the lock of a run folder."""
    path = root.resolve() / LOCK
    if path in _held or not path.is_file():
        return False
    try:
        with path.open("r+", encoding="utf-8") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return True  # or the file belongs to another user, whose run this process cannot resume
    except OSError:
        return False  # a file system without locks: unknown
    return False


def _holder(file: IO[str]) -> str:
    file.seek(0)
    with suppress(ValueError, KeyError):  # the holder has the lock, but has not written the file yet
        holder = json.load(file)
        return f"process {holder['pid']} on {holder['host']}, which started at {holder['start']}"
    return "another process"
