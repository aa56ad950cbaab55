"""Files that outlast a kill or a power failure at any moment."""

import os
from pathlib import Path


def write_durably(path: Path, text: str) -> None:
    """Replace a file atomically: after a kill or a power failure at any moment it holds the old or the new text."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Sync a file, or the directory entries of a folder, to the disk (``fsync``)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
