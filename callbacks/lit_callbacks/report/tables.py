"""Tables in a run's folder that its report shows: an evaluation, a comparison with a server.

Whoever writes a table chooses its kind; the report shows the newest of each kind.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path

TABLES = "tables"
"""Folder of the tables in a run's folder."""


@dataclass(frozen=True)
class ReportTable:
    """A table with the command that made it.

    Args:
        title: headline in the report.
        command: command line that writes this table again.
        written: date and time, ISO 8601.
        columns: headers.
        rows: cells, one per column; None is an empty cell.
        notes: sentences below the table.
        is_fault: True for a table that shows something wrong; the report marks it.
    """

    title: str
    command: str
    written: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str | float | None]]
    notes: Sequence[str] = ()
    is_fault: bool = False

    def __post_init__(self) -> None:
        if any(len(row) != len(self.columns) for row in self.rows):
            raise ValueError(f"a row of the table {self.title!r} must have {len(self.columns)} cells")

    def write(self, folder: str | Path, kind: str) -> Path:
        """Write the table into a run's folder as ``tables/<kind>-<number>.json``, beside earlier ones.

        Args:
            folder: folder of the run.
            kind: what the table is, e.g. ``evaluation``; without a hyphen.

        Raises:
            OSError: the folder cannot be written.
        """
        if "-" in kind:
            raise ValueError(f"kind={kind!r} must have no hyphen: one stands before the number of the file")
        tables = Path(folder) / TABLES
        tables.mkdir(parents=True, exist_ok=True)
        path = next(path for number in count(1) if not (path := tables / f"{kind}-{number}.json").exists())
        with path.open("x", encoding="utf-8") as file:
            file.write(json.dumps(asdict(self), ensure_ascii=False, indent=1) + "\n")
        return path


def newest_tables(folder: Path) -> Mapping[str, Path]:
    """Files of the newest table of each kind in a run's folder, by kind."""
    newest: dict[str, tuple[int, Path]] = {}
    for path in sorted((folder / TABLES).glob("*-*.json")):
        kind, _, number = path.stem.rpartition("-")
        if number.isdecimal():
            newest[kind] = max(newest.get(kind, (0, path)), (int(number), path))
    return {kind: path for kind, (_, path) in sorted(newest.items())}


def read_table(path: Path) -> ReportTable:
    """Read a table's file.

    Raises:
        ValueError: the file holds no table.
        OSError: the file cannot be read.
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    try:
        return ReportTable(**content)
    except TypeError as error:
        raise ValueError(f"{path} holds no table of a report ({error}); remove it, or run its command again") from error
