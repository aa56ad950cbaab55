"""Atomic writes of model folders, and retention of the newest.

A folder is written under a hidden name, with its manifest last, and synced to the disk before it is renamed. The hidden
names, for a folder ``merged``: ``.merged.<process id>`` (being written), ``.merged.old`` (the complete previous folder,
while it is replaced), ``.merged.removed`` (being removed).
"""

import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

from lit_callbacks.durable_writes import sync
from lit_callbacks.export.manifest import MANIFEST, ManifestError, list_files, read_manifest, write_manifest
from lit_callbacks.export.tokenizer_files import save_tokenizer
from lit_callbacks.output.heartbeat import heartbeat

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_OF_A_MODEL = {"config.json", "adapter_config.json", MANIFEST}
"""Files of which a model's folder has at least one; what a module writes itself has the manifest alone."""

_KNOWN_FILES = (
    *("config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json"),
    *("adapter_config.json", "adapter_model.safetensors", "base.json", "README.md", MANIFEST),
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model", "chat_template.jinja"),
    *("vocab.json", "vocab.txt", "merges.txt", "additional_chat_templates/*.jinja"),
    *("*processor_config.json", "chat_template.json", "LICENSE*", "NOTICE*"),
)
"""Name patterns of a model's files, for folders without a manifest."""


def write_atomically(
    folder: Path,
    write: Callable[[Path], object],
    tokenizer: "PreTrainedTokenizerBase | None",
    texts: Mapping[str, str] | None = None,
) -> None:
    """Write a model folder under a temporary name next to its final path, then rename it; replaces an earlier model.

    After a kill at any moment, the path holds a complete folder or nothing, and the earlier model still exists, under
    its own name or as ``.<name>.old``, which the next call restores.

    Args:
        folder: path of the model folder.
        write: function that writes the model into the folder that it is given.
        tokenizer: tokenizer to save in the folder; None saves none.
        texts: text files to add to the folder, by name.

    Raises:
        ValueError: ``folder`` holds files that are not part of a model.
        OSError: a file cannot be written, as on a full disk.
    """
    folder = Path(os.path.realpath(folder))  # for a symbolic link, its target is replaced and the link stays
    recover(folder)
    check_replaceable(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)  # a module that writes itself makes its own folder only
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        with errors_of_the_disk(folder):
            with heartbeat(f"writing {folder}"):
                write(temporary)
            if tokenizer is not None:
                save_tokenizer(tokenizer, temporary)
            for name, text in (texts or {}).items():
                (temporary / name).write_text(text, encoding="utf-8")
            write_manifest(temporary)
        with _alone_in(folder.parent):
            _replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def errors_of_the_disk(folder: Path) -> Iterator[None]:
    """Give the system's errors as those of Python, with the folder's name.

    safetensors puts them into a text of its own; Python names no file where it is open already, as when a disk fills.
    """
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            error.filename = str(folder)
        raise
    except Exception as error:  # SafetensorError; the package may not be installed
        if (number := re.search(r"\(os error (\d+)\)", str(error))) is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(folder)) from error


def _replace(temporary: Path, folder: Path) -> None:
    old = folder.with_name(f".{folder.name}.old")
    if folder.exists():
        folder.rename(old)
    try:
        temporary.rename(folder)
    except OSError:
        if old.exists():
            old.rename(folder)
        raise
    sync(folder.parent)
    _remove(old, folder)


def _remove(path: Path, folder: Path) -> None:
    """Remove a folder; it is renamed first, so that a kill leaves no incomplete folder under its name.

    Args:
        path: folder to remove; it may be missing.
        folder: model folder from whose name the hidden name is derived.
    """
    removed = folder.with_name(f".{folder.name}.removed")
    shutil.rmtree(removed, ignore_errors=True)
    if path.exists():
        path.rename(removed)
        shutil.rmtree(removed, ignore_errors=True)


def recover(folder: Path) -> None:
    """Restore the earlier model after a killed replacement, and remove the temporary folders of killed processes.

    Args:
        folder: path of the model folder; it may be missing.
    """
    put_back(folder)
    if not folder.parent.is_dir():
        return
    with _alone_in(folder.parent):
        _remove(folder.with_name(f".{folder.name}.old"), folder)
    unfinished = re.compile(re.escape(f".{folder.name}.") + r"(\d+)")
    for path in list(folder.parent.iterdir()):
        if (match := unfinished.fullmatch(path.name)) and not _runs(int(match[1])):
            shutil.rmtree(path, ignore_errors=True)


def put_back(folder: Path) -> None:
    """Restore the earlier model after a killed replacement, unless ``folder`` exists."""
    old = folder.with_name(f".{folder.name}.old")
    if not old.is_dir() or folder.exists():
        return
    with _alone_in(folder.parent):  # the process that replaces it may still run
        if old.is_dir() and not folder.exists():
            old.rename(folder)


@contextmanager
def _alone_in(parent: Path) -> Iterator[None]:
    """Context in which no other process renames models in a folder, where its file system has locks."""
    if fcntl is None:
        yield
        return
    descriptor = os.open(parent, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's process, or not a valid process id: do not touch its folder
        pass
    return True


def check_replaceable(folder: Path) -> None:
    """Check that a folder holds nothing but a model, so that it may be replaced.

    Raises:
        ValueError: it holds other files.
    """
    if not folder.exists():
        return
    with _alone_in(folder.parent):
        foreign = foreign_files(folder) if folder.is_dir() else ["a file"]
    if foreign:
        raise ValueError(
            f"{str(folder)!r} holds other things than a model ({', '.join(foreign[:3])}), which would be lost; "
            "name a new folder"
        )


def foreign_files(folder: Path) -> list[str]:
    """Files that are not part of a model: not in the folder's manifest or, without one, not in ``_KNOWN_FILES``."""
    names = sorted(list_files(folder), key=lambda name: (name.count("/"), name))
    try:
        listed = read_manifest(folder)
    except (FileNotFoundError, ManifestError):
        return [name for name in names if not any(fnmatch(name, known) for known in _KNOWN_FILES)]
    return [name for name in names if name not in listed]


def keep_newest(folder: Path, prefix: str, count: int) -> None:
    """Remove all but the newest of the models named ``prefix`` plus a number.

    Folders that hold other files are kept and not counted.

    Args:
        folder: parent folder of the models.
        prefix: start of their names, e.g. ``adapter-step-``.
        count: number of models to keep, by modification time: a restarted run may have lower step numbers.
    """
    numbered = re.compile(re.escape(prefix) + r"\d+")
    models = [
        path
        for path in folder.iterdir()
        if numbered.fullmatch(path.name)
        and any((path / name).exists() for name in _OF_A_MODEL)
        and not foreign_files(path)
    ]
    for path in sorted(models, key=lambda path: path.stat().st_mtime_ns)[:-count]:
        _remove(path, path)
