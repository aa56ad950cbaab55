"""JSON files that hold one object, where a list of rows or a row a line is needed: what was found, and the fix."""

import json
import shlex
from collections.abc import Mapping
from gzip import GzipFile
from pathlib import Path
from typing import IO

from lit_callbacks.output.quantities import as_count

from lit_ft.data.text.json_list import LONGEST_ROW_BYTES
from lit_ft.errors import RecipeError

_COLUMNS = frozenset(
    ("completion", "conversations", "input_ids", "instruction", "messages", "output", "prompt", "question", "text")
)
"""Names that an object has as a row, or as columns with all rows."""


def refuse_one_object(file: Path, stream: IO[bytes] | GzipFile) -> None:
    """Refuse a file that is one object and no row: rows below a key, rows by name, columns, a row over several lines.

    Args:
        file: path, for messages.
        stream: its content, from the start; the first character that is no space is ``{``.

    Raises:
        RecipeError: the file is such an object; the message has the command that rewrites it.
    """
    text = stream.readline(LONGEST_ROW_BYTES)
    is_row = _object(text) is not None
    is_longer_line = len(text) == LONGEST_ROW_BYTES and not text.endswith(b"\n")  # is refused when lines are read
    if is_row and ".jsonl" in file.suffixes:
        return  # a row a line, of which a file may have one
    text += stream.readline(LONGEST_ROW_BYTES) if is_row else stream.read(LONGEST_ROW_BYTES)
    # Rows a line and what is broken are read line by line, which names the line.
    if (content := _object(text)) is not None:
        _refuse(file, content, is_over_lines=not is_row and not is_longer_line)


def _object(text: bytes) -> Mapping[str, object] | None:
    try:
        content = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def _refuse(file: Path, content: Mapping[str, object], is_over_lines: bool) -> None:
    if _are_columns(content):
        raise RecipeError(f"{file}: is one object of columns; a list of rows is needed: {_by_pandas(file)}")
    is_row = not _COLUMNS.isdisjoint(content)
    lists = {key: value for key, value in content.items() if isinstance(value, list) and _all_objects(value)}
    if lists and not is_row:
        keys = " and ".join(f"{key!r} ({len(rows):,})" for key, rows in lists.items())
        rewrite = _by_jq(file, _key(next(iter(lists))))
        raise RecipeError(f"{file}: is one object with rows in {keys}; a list of rows is needed: {rewrite}")
    if not is_row and _all_objects(list(content.values())):
        names = [one["file_name"] for one in content.values() if isinstance(one, dict) and "file_name" in one]
        if names:
            raise RecipeError(
                f"{file}: is LLaMA-Factory's list of data sets; name the file of one: "
                f"--data.path {shlex.quote(str(file.with_name(str(names[0]))))}"
            )
        raise RecipeError(
            f"{file}: is one object with {as_count(len(content), 'row')} by name; a list of rows is needed: "
            f"{_by_jq(file, '[.[]]')}"
        )
    if is_over_lines:
        rewrite = _by_jq(file, "[.]")
        raise RecipeError(
            f"{file}: is one object over several lines; a list of rows is needed, or a row a line: {rewrite}"
        )


def _all_objects(values: list[object]) -> bool:
    return bool(values) and all(isinstance(value, dict) for value in values)


def _are_columns(content: Mapping[str, object]) -> bool:
    """Whether the values are columns, as pandas writes them: lists of texts, or objects by the row's number."""
    if _COLUMNS.isdisjoint(content):
        return False
    columns = content.values()
    by_number = all(isinstance(one, dict) and one and all(key.isdecimal() for key in one) for one in columns)
    texts = [one for one in columns if isinstance(one, list) and all(isinstance(text, str) for text in one)]
    lengths = {len(one) for one in texts}
    return by_number or (len(texts) == len(content) > 1 and len(lengths) == 1 and min(lengths) > 1)


def _target(file: Path) -> Path:
    return file.with_name(f"{file.name.split('.')[0]}-rows.json")


def _key(name: str) -> str:
    """Path of jq to the value of a key."""
    return f".{name}" if name.isidentifier() and name.isascii() else f".[{json.dumps(name, ensure_ascii=False)}]"


def _by_jq(file: Path, path: str) -> str:
    quoted, target = shlex.quote(str(file)), shlex.quote(str(_target(file)))
    rewrite = f"jq {shlex.quote(path)}"
    return f"zcat {quoted} | {rewrite} > {target}" if file.suffix == ".gz" else f"{rewrite} {quoted} > {target}"


def _by_pandas(file: Path) -> str:
    read = f"pandas.read_json({str(file)!r}, dtype=False, convert_dates=False)"
    code = f"import pandas; {read}.to_json({str(_target(file))!r}, orient='records')"
    return f"python -c {shlex.quote(code)}"
