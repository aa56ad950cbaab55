"""JSONL files of lines with an optimizer step, which a resumed run continues."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn


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
    """Drop the lines after ``step``, which a resumed run writes again; at step 0, drop all lines.

    Where lines are damaged, a warning counts them, and the file is kept beside the new one, as ``NAME.damaged``.
    """
    if not path.exists():
        return
    lines = [line for line in path.read_bytes().split(b"\n") if line.strip()]
    steps = [_step_of(line) for line in lines]
    kept = [line + b"\n" for line, at in zip(lines, steps, strict=True) if at is not None and at <= step and step > 0]
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_bytes(b"".join(kept))
    if damaged := steps.count(None):
        backup = path.with_name(f"{path.name}.damaged")
        path.replace(backup)
        rank_zero_warn(
            f"{str(path)!r}: {damaged:,} of {len(lines):,} lines are damaged and left out; the file is kept as "
            f"{backup.name!r}"
        )
    unfinished.replace(path)


def _step_of(line: bytes) -> int | None:
    """Optimizer step of a line; None if the line is damaged."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, TypeError, KeyError):  # UnicodeDecodeError is a ValueError
        return None
    return step if isinstance(step, int) else None
