"""Files to raw rows, with errors that name the file and the place in it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lit_ft.errors import RecipeError

RawRow = dict[str, Any]


def read_rows(path: str, option: str = "data.path") -> list[RawRow]:
    """Read a JSON file (a list of objects) or a JSON-lines file (one object a line).

    Args:
        path: the file.
        option: the option that named it, for error messages.

    Raises:
        RecipeError: the file is missing, does not parse, or holds something else or nothing.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        what = "is a folder, not a file" if file.is_dir() else "does not exist"
        raise RecipeError(f"{option}={path!r} {what}; give a .json file (a list of objects) or a .jsonl file")
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: byte {error.start} is not UTF-8; convert the file to UTF-8") from error
    rows = list(_parse_lines(path, text)) if file.suffix == ".jsonl" else _parse_document(path, text)
    if not rows:
        raise RecipeError(f"{option}={path!r} holds no rows; at least one is needed")
    return rows


def _parse_document(path: str, text: str) -> list[RawRow]:
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise RecipeError(
            f"{path}, line {error.lineno}, column {error.colno}: not JSON ({error.msg}); "
            "mend that line (a file with one object a line must end in .jsonl)"
        ) from error
    if not isinstance(document, list):
        raise RecipeError(f"{path}: holds a JSON {type(document).__name__}; a list of objects is needed")
    for number, row in enumerate(document, 1):
        _check_object(f"{path}, row {number}", row)
    return document


def _parse_lines(path: str, text: str) -> Iterator[RawRow]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise RecipeError(f"{path}, line {number}: not JSON ({error.msg}); mend that line") from error
        yield _check_object(f"{path}, line {number}", row)


def _check_object(place: str, row: Any) -> RawRow:
    if not isinstance(row, dict):
        raise RecipeError(f"{place}: is a JSON {type(row).__name__}; each row must be an object")
    return row
