"""Folders of models that appear whole or not at all, and of which the newest are kept.

A folder is written under a hidden name, with a manifest last, and made durable before it is moved to its place. Hidden
names, for ``merged``: ``.merged.<process>`` (being written), ``.merged.old`` (set aside, whole), ``.merged.removed``
(being removed).
"""

import os
import re
import shutil
from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from lit_callbacks.export.manifest import MANIFEST, ManifestError, list_files, read_manifest, sync, write_manifest

_OF_A_MODEL = {"config.json", "adapter_config.json"}

_KNOWN_FILES = (
    *("config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json"),
    *("adapter_config.json", "adapter_model.safetensors", "base.json", "README.md", MANIFEST),
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model", "chat_template.jinja"),
    *("vocab.json", "vocab.txt", "merges.txt", "additional_chat_templates/*.jinja"),
)
"""What models consist of, for folders without a manifest."""


def write_atomically(
    folder: Path, write: Callable[[Path], None], tokenizer: Any, texts: Mapping[str, str] | None = None
) -> None:
    """Write a model's folder beside its place, then move it there; an earlier model there is replaced.

    After a kill at any moment, the place holds a whole folder or nothing, and what was there before is still there,
    under its own name or as ``.<name>.old``, which the next call puts back.

    Args:
        folder: where to.
        write: writes the model into the folder that it is given.
        tokenizer: saved with it; None saves none.
        texts: files that go with it, by name.

    Raises:
        ValueError: ``folder`` holds other things than a model.
    """
    folder = Path(os.path.realpath(folder))  # of a link to a folder, the folder is replaced
    recover(folder)
    check_replaceable(folder)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        write(temporary)
        if tokenizer is not None:
            tokenizer.save_pretrained(temporary)
        for name, text in (texts or {}).items():
            (temporary / name).write_text(text, encoding="utf-8")
        write_manifest(temporary)
        _replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


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
    """Remove a folder; a kill meanwhile leaves nothing half under its name.

    Args:
        path: is removed; it may be missing.
        folder: whose hidden name it gets.
    """
    removed = folder.with_name(f".{folder.name}.removed")
    shutil.rmtree(removed, ignore_errors=True)
    if path.exists():
        path.rename(removed)
        shutil.rmtree(removed, ignore_errors=True)


def recover(folder: Path) -> None:
    """Put back what a killed replacement set aside, and remove what killed processes left.

    Args:
        folder: the place; it may be empty.
    """
    put_back(folder)
    if not folder.parent.is_dir():
        return
    _remove(folder.with_name(f".{folder.name}.old"), folder)
    unfinished = re.compile(re.escape(f".{folder.name}.") + r"(\d+)")
    for path in list(folder.parent.iterdir()):
        if (found := unfinished.fullmatch(path.name)) and not _runs(int(found[1])):
            shutil.rmtree(path, ignore_errors=True)


def put_back(folder: Path) -> None:
    """Put back what a killed replacement set aside, where nothing has taken its place."""
    old = folder.with_name(f".{folder.name}.old")
    if old.is_dir() and not folder.exists():
        old.rename(folder)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # somebody else's, or no number of a process: left alone
        pass
    return True


def check_replaceable(folder: Path) -> None:
    """Refuse to replace a folder that holds anything but a model.

    Raises:
        ValueError: it holds other things.
    """
    if not folder.exists():
        return
    foreign = foreign_files(folder) if folder.is_dir() else ["a file"]
    if foreign:
        raise ValueError(
            f"{str(folder)!r} holds other things than a model ({', '.join(foreign[:3])}), which would be lost; "
            "name a new folder"
        )


def foreign_files(folder: Path) -> list[str]:
    """Files that are no part of a model: those that its manifest does not name, or that no model consists of."""
    held = sorted(list_files(folder), key=lambda name: (name.count("/"), name))
    try:
        names: Any = read_manifest(folder)["files"]
    except (FileNotFoundError, ManifestError):
        return [name for name in held if not any(fnmatch(name, known) for known in _KNOWN_FILES)]
    return [name for name in held if name not in names]


def keep_newest(folder: Path, prefix: str, count: int) -> None:
    """Remove all but the newest of the models named ``prefix`` and a number.

    Folders with other things in them stay, and do not count.

    Args:
        folder: holds them.
        prefix: ``adapter-step-``, say.
        count: how many stay, by when they were written: a run that begins again may count from lower numbers.
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
