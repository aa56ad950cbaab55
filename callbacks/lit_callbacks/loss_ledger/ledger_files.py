"""Files of a loss ledger: one Parquet or CSV file per rank and write."""

import csv
import re
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_NAME = re.compile(r"from(\d+)-to(\d+)\.rank(\d+)\.(?:parquet|csv)")


class Visit(NamedTuple):
    """Loss of one sample in one optimizer step."""

    step: int
    """Optimizer steps done before this one."""
    epoch: int
    id: str
    source: str
    """Source of the sample; empty where samples have none."""
    loss: float
    """Mean over the sample's supervised tokens, in nats."""
    tokens: int
    """Number of supervised tokens."""


class Visits(NamedTuple):
    """Several visits, as columns."""

    step: list[int]
    epoch: list[int]
    id: list[str]
    source: list[str]
    loss: list[float]
    tokens: list[int]


def get_ready() -> None:
    """Import pyarrow and what its first table imports (pandas if installed), so that no training step waits for it."""
    with suppress(ModuleNotFoundError):
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.table({"": [""]}), pyarrow.BufferOutputStream())


def write_part(folder: Path, started: int, rank: int, visits: Visits) -> Path:
    """Write visits of one rank to a new file.

    Args:
        folder: folder of the ledger; created if missing.
        started: optimizer step at which this run started or was resumed.
        rank: rank that the visits are of.
        visits: visits in the order of their steps; at least one.

    Returns:
        Path of the file: Parquet if pyarrow is installed, else CSV.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # A part that a killed run leaves is not read; the next write of this rank replaces it.
    unfinished = folder / f".unfinished.rank{rank}"
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError:
        ending = "csv"
        with unfinished.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([visits._fields, *zip(*visits, strict=True)])
    else:
        ending = "parquet"
        parquet.write_table(pyarrow.table(visits._asdict()), unfinished)
    return unfinished.replace(folder / f"from{started:08d}-to{visits.step[-1] + 1:08d}.rank{rank}.{ending}")


def read_visits(folder: Path) -> list[Visit]:
    """All visits of a ledger in the order of steps, without those that a resumed run has repeated."""
    parts = {path: tuple(map(int, match.groups())) for path in folder.glob("from*") if (match := _match(path))}
    starts = sorted({started for started, _, _ in parts.values()})
    visits: list[Visit] = []
    for path, (started, _, _) in parts.items():
        taken_back_at = min((other for other in starts if other > started), default=None)
        visits += [v for v in _read(path) if taken_back_at is None or v.step < taken_back_at]
    return sorted(visits, key=lambda visit: visit.step)


def forget(folder: Path, started: int, rank: int, world_size: int) -> None:
    """Delete a rank's files of runs that started at or after a step: the run starts there again.

    Rank 0 also deletes those of ranks that an earlier run had and this one does not have.

    Args:
        folder: folder of the ledger.
        started: optimizer step at which this run starts.
        rank: this rank.
        world_size: number of ranks of this run.
    """
    for path in folder.glob("from*"):
        if (match := _match(path)) is None or int(match.group(1)) < started:
            continue
        owner = int(match.group(3))
        if (owner if owner < world_size else 0) == rank:
            path.unlink()


def _match(path: Path) -> re.Match[str] | None:
    return _NAME.fullmatch(path.name)


def _read(path: Path) -> list[Visit]:
    if path.suffix == ".csv":
        with path.open(newline="", encoding="utf-8") as file:
            rows = csv.reader(file)
            next(rows)
            return [Visit(int(s), int(e), i, o, float(loss), int(t)) for s, e, i, o, loss, t in rows]
    from pyarrow import parquet

    columns = parquet.read_table(path).to_pydict()
    return [Visit(*row) for row in zip(*(columns[name] for name in Visit._fields), strict=True)]
