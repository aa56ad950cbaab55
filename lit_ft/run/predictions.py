"""The file of answers that ``predict`` writes: one line of JSON per row; nothing is overwritten."""

import json
import tempfile
from collections.abc import Iterable
from itertools import count
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lit_callbacks.export.manifest import write_durably

from lit_ft.errors import RecipeError


def free_path(folder: Path, out: str | None) -> Path:
    """Path of the file to write: ``out``, else ``predictions.jsonl`` in a folder, numbered if that exists.

    Args:
        folder: folder of the run.
        out: path that the user gives; None for none.

    Raises:
        RecipeError: ``out`` exists, or its folder cannot be written.
    """
    if out is None:
        names = (f"predictions{'' if number == 1 else f'-{number}'}.jsonl" for number in count(1))
        return next(folder / name for name in names if not (folder / name).exists())
    path = Path(out).expanduser()
    if path.exists() or path.is_symlink():
        raise RecipeError(f"out={out!r} exists, and is not overwritten; name another file, or remove it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(exist_ok=False)
        path.unlink()
    except OSError as error:
        raise RecipeError(f"out={out!r} cannot be written ({error.strerror}); name another file") from error
    return path


def gather(answers: list[Any]) -> list[Any]:
    """Answers of all ranks in the order of the rows, each once, on rank 0; other ranks get none. A collective."""
    parts: list[list[Any]] = [answers]
    if dist.is_initialized() and dist.get_world_size() > 1:
        is_first = dist.get_rank() == 0
        parts = [[]] * dist.get_world_size()
        dist.gather_object(answers, parts if is_first else None, dst=0)
        if not is_first:
            return []
    together = [answer for part in parts for answer in part]
    if not all(isinstance(answer, dict) and "row" in answer for answer in together):
        return together  # of another module than CausalLM
    by_row = {answer["row"]: answer for answer in together}
    return [{key: value for key, value in by_row[row].items() if key != "row"} for row in sorted(by_row)]


def write(path: Path, answers: Iterable[object]) -> None:
    """Write answers to a new file, one line each.

    Raises:
        RecipeError: the file cannot be written, or has come to exist while the answers were generated; they are in a
            temporary file then, which the message names.
    """
    lines = "".join(json.dumps(answer, ensure_ascii=False) + "\n" for answer in answers)
    problem = "was written by another process meanwhile"
    if not path.exists():
        try:
            write_durably(path, lines)
            return
        except OSError as error:
            problem = f"cannot be written ({error.strerror})"
    kept = Path(tempfile.mkdtemp(prefix="lit_ft-")) / path.name
    write_durably(kept, lines)
    raise RecipeError(f"{path} {problem}; the answers are in {kept}")
