"""Files of an evaluation: a new numbered folder, and a table for the run's report."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from itertools import count
from pathlib import Path

import numpy as np
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lit_callbacks.durable_writes import write_durably
from lit_callbacks.report.run_report import write_report
from lit_callbacks.report.tables import ReportTable

from lit_ft.errors import RecipeError
from lit_ft.run.folder import RunFolder
from lit_ft.scoring.scores import COLUMNS, Cell

EVALUATIONS = "evaluations"
"""Folder of the evaluations in a run's folder, and below ``checkpoints/`` those of other models."""


@contextmanager
def new_folder(path: str, out: str | None) -> Iterator[Path]:
    """Context of a new folder ``<number>`` for an evaluation's files; it is removed if nothing was written.

    Args:
        path: what is evaluated: a run has its evaluations with it.
        out: folder of the evaluations; None is ``RUN/evaluations``, else ``checkpoints/evaluations/<name>``.

    Raises:
        RecipeError: the folder cannot be written.
    """
    source = Path(path).expanduser()
    is_run = RunFolder(source).config.is_file()
    name = source.resolve().name if source.exists() else path.replace("/", "--")
    default = source / EVALUATIONS if is_run else Path("checkpoints") / EVALUATIONS / name
    parent = default if out is None else Path(out).expanduser()
    folder = _created(parent)
    try:
        yield folder
    finally:
        if not any(folder.iterdir()):
            folder.rmdir()


def _created(parent: Path) -> Path:
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for number in count(1):
            try:
                (parent / str(number)).mkdir()
            except FileExistsError:
                continue
            return parent / str(number)
    except OSError as error:
        raise RecipeError(
            f"{str(parent)!r} cannot be written ({error.strerror}); name another folder with --out"
        ) from error
    raise AssertionError("the numbers have no end")


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Write a file of JSON; values that JSON lacks are written as text."""
    text = json.dumps(content, ensure_ascii=False, indent=1, default=_plain)
    write_durably(path, text + "\n")


def write_lines(path: Path, lines: Iterable[Mapping[str, object]]) -> None:
    """Write a file of JSON lines."""
    write_durably(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


def _plain(value: object) -> object:
    return value.item() if isinstance(value, np.generic) else str(value)


def table_of(rows: Sequence[Sequence[Cell]], notes: Sequence[str], command: str) -> ReportTable:
    """Table of an evaluation."""
    written = datetime.now().astimezone().isoformat(" ", "seconds")
    return ReportTable("what fine-tuning changed", command, written, COLUMNS, rows, notes)


def add_to_report(run: Path, table: ReportTable, kind: str) -> list[Path]:
    """Write a table into a run's folder, and its report anew if it has one; returns the files.

    A folder that cannot be written is told in a warning: figures that are measured are shown elsewhere, too.
    """
    written = []
    try:
        written.append(table.write(run, kind))
        if (run / "report.html").is_file():
            written.append(write_report(run)[0])
    except OSError as error:
        rank_zero_warn(f"the report of {run} does not have this table: {error.filename}: {error.strerror}")
    return written
