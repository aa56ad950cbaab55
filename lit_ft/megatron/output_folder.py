"""Output folders that appear complete or not at all, and whose writing can be resumed.

The content is written in steps to ``.<name>.unfinished`` beside the final path. A step that is complete stays there
after a kill, and the same command takes it from there.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lit_callbacks.durable_writes import sync, write_durably
from lit_callbacks.export.manifest import list_files, write_manifest

from lit_ft.checkpointing.storage.replacement import replace
from lit_ft.errors import RecipeError

_COMMAND = "unfinished.json"


def check_free(path: Path) -> None:
    """Refuse a path that is taken, unless by an empty folder.

    Raises:
        RecipeError: the path exists.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise RecipeError(f"out={str(path)!r} exists; name a new folder, or remove it")


class OutputFolder:
    """Folder that is being written: a context, at whose end it is complete under its name."""

    def __init__(self, path: Path, command: Mapping[str, object] | None) -> None:
        """Open the folder, with the complete steps of an earlier process that ran the same command.

        Args:
            path: final path.
            command: what determines the content, as JSON; None if no later process can continue, so that an
                interruption keeps nothing.

        Raises:
            RecipeError: the path exists, or another process writes it.
        """
        self.path = path.expanduser().absolute()
        self.temporary = self.path.with_name(f".{self.path.name}.unfinished")
        check_free(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = self.path.with_name(f".{self.path.name}.lock")
        try:
            self._locked = _lock(self._lock)
        except BlockingIOError as error:
            raise RecipeError(f"out={str(path)!r} is being written by another process; name another folder") from error
        self._is_kept = command is not None
        text = json.dumps(command, indent=1, sort_keys=True, default=str)
        record = self.temporary / _COMMAND
        if self._is_kept and record.is_file() and record.read_text(encoding="utf-8") == text:
            rank_zero_info(f"{self.temporary} is continued")
        else:
            shutil.rmtree(self.temporary, ignore_errors=True)
            self.temporary.mkdir()
            write_durably(record, text)

    def step(self, name: str, write: Callable[[Path], object]) -> None:
        """Write a file or folder, unless an earlier process has.

        Args:
            name: path within the folder.
            write: writes it to the path that it is given.
        """
        final = self.temporary / name
        if final.exists():
            return
        final.parent.mkdir(parents=True, exist_ok=True)
        partial = final.with_name(f"{final.name}.partial")
        if partial.is_dir():
            shutil.rmtree(partial)
        write(partial)
        sync(partial)
        partial.rename(final)
        sync(final.parent)

    def text(self, name: str, text: str) -> None:
        """Write a text file."""
        path = self.temporary / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def __enter__(self) -> "OutputFolder":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Give the folder its name, or remove what was written if it cannot be used; an interruption keeps it."""
        try:
            if kind is None:
                self._finish()
            elif not self._is_kept or issubclass(kind, RecipeError):
                shutil.rmtree(self.temporary)
        finally:
            self._lock.unlink(missing_ok=True)  # while it is locked: another process may lock the next file
            self._locked.close()

    def _finish(self) -> None:
        write_manifest(self.temporary, names=[name for name in list_files(self.temporary) if name != _COMMAND])
        (self.temporary / _COMMAND).unlink()
        if self.path.is_dir():
            self.path.rmdir()  # it is empty
        replace(self.temporary, self.path)


def _lock(path: Path) -> IO[str]:
    """Lock a file that its holder removes at the end; closing it releases the lock.

    Raises:
        BlockingIOError: another process holds it.
    """
    while True:
        file = path.open("a", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise
        except OSError:  # the file system has no locks
            return file
        # A file that was opened before its holder removed it could be locked beside the next one of that name.
        with suppress(FileNotFoundError):
            if os.path.samestat(path.stat(), os.fstat(file.fileno())):
                return file
        file.close()
