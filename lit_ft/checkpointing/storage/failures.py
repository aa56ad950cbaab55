"""One-line errors for checkpoints and logs that cannot be written or read."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.distributed.checkpoint import CheckpointException

from lit_ft.errors import RecipeError


@contextmanager
def explain_failed_save(path: Path, temporary: Path | None = None) -> Iterator[None]:
    """Turn system errors on any rank into one line, and remove what was written so far to ``temporary``.

    Raises:
        RecipeError: the checkpoint could not be written; the message names it.
    """
    try:
        yield
    except (OSError, CheckpointException) as error:
        if temporary is not None:
            _remove(temporary)
        kept = "; the earlier one of that name is kept" if path.exists() else ""
        raise RecipeError(
            f"checkpoint {str(path)!r} could not be written: {_reason(error)}{kept}; make room or name a --run_dir "
            "that can be written, then resume with --ckpt_path last"
        ) from error


@contextmanager
def explain_failed_load(path: Path) -> Iterator[None]:
    """Turn errors while reading shards, on any rank, into one line.

    Raises:
        RecipeError: the checkpoint could not be read; the message names it.
    """
    try:
        yield
    except (OSError, CheckpointException) as error:
        raise RecipeError(
            f"checkpoint {str(path)!r} could not be read: {_reason(error)}; --ckpt_path last takes the newest good one"
        ) from error


@contextmanager
def explain_failed_write(path: Path) -> Iterator[None]:
    """Turn system errors into one line that names the file or folder.

    Raises:
        RecipeError: the disk is full or read-only, or the folder was removed while the run ran.
    """
    try:
        yield
    except OSError as error:
        if not path.parent.is_dir():
            raise RecipeError(
                f"{str(path)!r} could not be written: its folder was removed while the run ran; put it back and resume "
                "with --ckpt_path last, or start again"
            ) from error
        raise RecipeError(
            f"{str(path)!r} could not be written: {_reason(error)}; checkpoints written before are kept; make room or "
            "make it writable again, then resume with --ckpt_path last"
        ) from error


def _reason(error: BaseException) -> str:
    if not isinstance(error, CheckpointException):
        return (error.strerror if isinstance(error, OSError) else None) or str(error)
    cause = cause_of(error)
    return f"rank {next(iter(error.failures))}: {type(cause).__name__}: {' '.join(str(cause).split())}"


def cause_of(error: CheckpointException) -> BaseException:
    """Error of the first rank that has one; the system's, if there is one among what led to it."""
    cause, _ = next(iter(error.failures.values()))
    before: BaseException | None = cause
    while before is not None and not isinstance(before, OSError):
        before = before.__context__  # torch's writer fails a second time when it closes a file that it could not write
    return before or cause


def _remove(temporary: Path) -> None:
    # Best effort: the error that is reported is the one that came first.
    if temporary.is_dir():
        shutil.rmtree(temporary, ignore_errors=True)
    else:
        temporary.unlink(missing_ok=True)
