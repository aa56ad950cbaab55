"""Atomic replacement of checkpoints, and recovery of replacements that a kill interrupted.

A new checkpoint is complete and on the disk under a hidden name before it replaces the earlier one. Hidden names, for
a target ``last.ckpt``: ``.last.ckpt.<pid>.new`` (file being written), ``.last.ckpt.new`` (folder being written by all
ranks), ``.last.ckpt.old`` (checkpoint being replaced), ``.last.ckpt.removed`` (checkpoint being removed).
"""

import os
import re
import shutil
from pathlib import Path

from lit_callbacks.export.manifest import sync

from lit_ft.checkpointing.storage.integrity import DamagedCheckpoint, check_intact

_HIDDEN = re.compile(r"\.(?P<name>.+?\.ckpt)(\.\d+)?\.(new|old|removed)")


def temporary_file(path: Path) -> Path:
    """Temporary path of a new checkpoint file, in the same folder: a rename across file systems is not atomic."""
    return path.with_name(f".{path.name}.{os.getpid()}.new")


def temporary_folder(path: Path) -> Path:
    """Temporary path of a new checkpoint folder, the same on all ranks."""
    return path.with_name(f".{path.name}.new")


def replace(temporary: Path, path: Path) -> None:
    """Rename a complete checkpoint to its final name; an earlier one, file or folder, is removed afterwards."""
    old = path.with_name(f".{path.name}.old")
    if temporary.is_dir() or (path.is_dir() and not path.is_symlink()):
        # No folder can be renamed to a name in use, nor a file to that of a folder: the earlier one is renamed first.
        _remove(old)
        if path.is_symlink() or path.exists():
            path.rename(old)
        temporary.rename(path)
    else:
        temporary.replace(path)
    sync(path.parent)
    _remove(old)


def remove(path: Path) -> None:
    """Remove a checkpoint; a kill in the middle leaves no partial checkpoint under its name."""
    removed = path.with_name(f".{path.name}.removed")
    if path.is_dir() and not path.is_symlink():
        _remove(removed)
        path.rename(removed)
        _remove(removed)
    else:
        path.unlink(missing_ok=True)


def recover(folder: Path) -> list[str]:
    """Finish replacements that a kill interrupted, and remove leftover files.

    No other process may write to the folder at the same time.

    Returns:
        One line of text for each checkpoint that was recovered.
    """
    lines = []
    for path in interrupted(folder):
        target = _target(path)
        if not target.exists():  # the new one goes before the old one
            target.unlink(missing_ok=True)  # a broken link
            path.rename(target)
            sync(folder)
            lines.append(f"{target} was being replaced when an earlier process was killed: a complete one is back")
    for path in _hidden(folder):
        _remove(path)
    return lines


def interrupted(folder: Path) -> list[Path]:
    """Complete checkpoints under hidden names whose final names are unused, new ones first."""
    complete = [path for path in _hidden(folder) if not path.name.endswith(".removed") and not _target(path).exists()]
    return sorted(filter(_is_complete, complete), key=lambda path: path.suffix)


def _hidden(folder: Path) -> list[Path]:
    return [path for path in folder.glob(".*") if _HIDDEN.fullmatch(path.name)]


def _target(path: Path) -> Path:
    match = _HIDDEN.fullmatch(path.name)
    assert match is not None
    return path.with_name(match["name"])


def _is_complete(path: Path) -> bool:
    try:
        return check_intact(path)
    except DamagedCheckpoint:
        return False


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
