"""JSONL files of lines with an optimizer step, which a resumed run continues."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Lines of a file; an empty list if it does not exist."""
    if not path.exists():
        return []
    # Not splitlines: it splits at U+2028 and others, which JSON strings may contain.
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]


def add_lines(path: Path, lines: Sequence[Mapping[str, object]]) -> None:
    """Append lines to a file; its folder is created if missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def drop_after_step(path: Path, step: int) -> None:
    """Drop the lines after ``step``, which a resumed run writes again; at step 0, drop all lines."""
    if not path.exists():
        return
    kept = [line for line in read_lines(path) if step > 0 and line["step"] <= step]
    path.unlink()
    add_lines(path, kept)
