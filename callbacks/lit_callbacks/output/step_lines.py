"""A JSONL file with a step in each line, which a resumed run goes on with."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The file's lines; none where there is no file."""
    if not path.exists():
        return []
    # Not splitlines: texts may hold U+2028 and others that are line ends to it, and none to JSON.
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]


def add_lines(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Add lines; the folder is made where it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def drop_after_step(path: Path, step: int) -> None:
    """Drop the lines of later steps than ``step``, and all where a run starts anew: it is about to write them again."""
    if not path.exists():
        return
    kept = [line for line in read_lines(path) if step > 0 and line["step"] <= step]
    path.unlink()
    add_lines(path, kept)
