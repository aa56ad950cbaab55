"""Folders of models that appear whole or not at all, and of which the newest are kept."""

import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_OF_A_MODEL = {"config.json", "adapter_config.json"}


def write_whole(
    folder: Path, write: Callable[[Path], None], tokenizer: Any, texts: Mapping[str, str] | None = None
) -> None:
    """Write a model's folder beside its place, then move it there; an earlier model there is replaced.

    Args:
        folder: where to.
        write: writes the model into the folder that it is given.
        tokenizer: saved with it; None saves none.
        texts: files that go with it, by name.

    Raises:
        ValueError: ``folder`` holds other things than a model.
    """
    check_replaceable(folder)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        write(temporary)
        if tokenizer is not None:
            tokenizer.save_pretrained(temporary)
        for name, text in (texts or {}).items():
            (temporary / name).write_text(text, encoding="utf-8")
        if folder.exists():
            shutil.rmtree(folder)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_replaceable(folder: Path) -> None:
    """Refuse to replace a folder that is not a model's.

    Raises:
        ValueError: it holds other things.
    """
    if not folder.exists():
        return
    held = {path.name for path in folder.iterdir()} if folder.is_dir() else {"a file"}
    if held and not held & _OF_A_MODEL:
        raise ValueError(
            f"{str(folder)!r} holds other things than a model ({', '.join(sorted(held)[:3])}), which would be lost; "
            "name a new folder"
        )


def keep_newest(folder: Path, prefix: str, count: int) -> None:
    """Remove all but the newest of the models named ``prefix`` and a number.

    Args:
        folder: holds them.
        prefix: ``adapter-step-``, say.
        count: how many stay, by when they were written: a run that begins again may count from lower numbers.
    """
    numbered = re.compile(re.escape(prefix) + r"\d+")
    models = [
        path
        for path in folder.iterdir()
        if numbered.fullmatch(path.name) and any((path / name).exists() for name in _OF_A_MODEL)
    ]
    for path in sorted(models, key=lambda path: path.stat().st_mtime_ns)[:-count]:
        shutil.rmtree(path)
