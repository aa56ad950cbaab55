"""Checkpoint files that contain their own SHA-256 sum.

``torch.save`` writes a zip archive. The sum of all its bytes is stored as the archive's comment, which every zip reader
skips and which stays in the file when it is copied.
"""

import hashlib
import os
import struct
from pathlib import Path
from typing import IO, cast

import torch
from lit_callbacks.export.manifest import sync

_COMMENT = b"lit_ft sha256="
_COMMENT_BYTES = len(_COMMENT) + 64
_FIRST_RECORD = b"PK\x03\x04"
_END_RECORD, _END_RECORD_BYTES = b"PK\x05\x06", 22
"""The last record of a zip archive without a comment; its last two bytes are the comment's length."""
_CHUNK_BYTES = 2**22


class _File:
    """File that keeps the first error of the system, because the archive writer hides it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._error: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self._error = self._error or error
            raise

    def flush(self) -> None:
        self._file.flush()

    def save(self, content: object) -> None:
        try:
            torch.save(content, cast(IO[bytes], self))
        except RuntimeError:
            if self._error is not None:
                raise self._error from None
            raise


class _HashingFile(_File):
    """File that hashes what is written."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        self.sha256 = hashlib.sha256()

    def write(self, data: bytes | memoryview) -> int:
        written = super().write(data)
        self.sha256.update(data)
        return written


def save_without_sum(content: object, path: Path) -> None:
    """Write a file as ``torch.save`` does, and flush it to the disk (fsync).

    Raises:
        OSError: the disk is full or cannot be written; ``torch.save`` itself would raise a ``RuntimeError`` of its own.
    """
    with path.open("wb") as file:
        _File(file).save(content)
        file.flush()
        os.fsync(file.fileno())
    sync(path.parent)


def save(checkpoint: object, path: Path) -> None:
    """Write a checkpoint with its sum, and flush it to the disk (fsync).

    Raises:
        OSError: the disk is full or cannot be written.
    """
    with path.open("wb") as file:
        hashing = _HashingFile(file)
        hashing.save(checkpoint)
        file.seek(-2, os.SEEK_END)
        file.write(struct.pack("<H", _COMMENT_BYTES) + _COMMENT + hashing.sha256.hexdigest().encode())
        file.flush()
        os.fsync(file.fileno())
    sync(path.parent)


def verify(path: Path) -> str | None:
    """Description of the damage of a checkpoint file; None if it is intact.

    Raises:
        NoChecksum: the file is complete but has no sum: another program, or an earlier version, wrote it.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(max(0, size - _COMMENT_BYTES - _END_RECORD_BYTES))
        tail = file.read()
        end, comment = tail[:_END_RECORD_BYTES], tail[_END_RECORD_BYTES:]
        if end[:4] == _END_RECORD and end[-2:] == struct.pack("<H", _COMMENT_BYTES) and comment.startswith(_COMMENT):
            written = comment.removeprefix(_COMMENT)
            is_same = _sha256(file, size - _COMMENT_BYTES - 2).encode() == written
            return None if is_same else "its bytes are not those that its SHA-256 sum was taken of"
        if tail[-_END_RECORD_BYTES:][:4] == _END_RECORD and tail[-2:] == b"\0\0":
            raise NoChecksum
    if not begins_as_checkpoint(path):
        return "it is no Lightning checkpoint; name a .ckpt file of a run"
    return f"it is truncated, or its end was overwritten ({size:,} bytes)"


def begins_as_checkpoint(path: Path) -> bool:
    """Whether the first bytes of a file are those of a checkpoint, as far as it has them."""
    with path.open("rb") as file:
        return _FIRST_RECORD.startswith(file.read(len(_FIRST_RECORD)))


class NoChecksum(Exception):
    """Error for a checkpoint file without a checksum."""


def _sha256(file: IO[bytes], count: int) -> str:
    """SHA-256 of a file's first ``count`` bytes and of a comment length of 0, as before the comment was added."""
    digest = hashlib.sha256()
    file.seek(0)
    while count > 0 and (chunk := file.read(min(_CHUNK_BYTES, count))):
        digest.update(chunk)
        count -= len(chunk)
    digest.update(b"\0\0")
    return digest.hexdigest()
