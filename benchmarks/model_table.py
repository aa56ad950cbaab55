"""Table of all causal LMs that transformers has: packed batches against single samples, at tiny size.

    python -m benchmarks.model_table --results model_table.jsonl # all architectures; prints docs/models.md
    python -m benchmarks.model_table --no-compile                # without that column, which takes most of the time
    python -m benchmarks.model_table lfm3 jamba                  # some, on the console
    python -m benchmarks.model_table lfm3 jamba --write          # these rows of docs/models.md anew

A results file takes each row when it is found. The same command then goes on where it was stopped: rows with the same
columns and versions are not found again.
"""

import argparse
import dataclasses
import json
import re
import time
import warnings
from collections.abc import Mapping
from pathlib import Path

import peft
import torch
import transformers

from benchmarks.model_comparison import ARCHITECTURES, HEADINGS, NOT_RUN, YES, Row, compare
from benchmarks.support_tables import DOCS, with_table
from lit_ft.model.isolation.architectures import COMPARED

BEGIN = "<!-- printed by python -m benchmarks.model_table -->\n"


class ResultsFile:
    """Rows that were found, one JSON object per line."""

    def __init__(self, path: Path | None, columns: frozenset[str]) -> None:
        """Read the rows that were found with these columns by the installed versions.

        Args:
            path: file, which need not exist; None keeps nothing.
            columns: columns that are found.
        """
        self._path = path
        self._found_with = {
            "columns": sorted(columns),
            "versions": {module.__name__: module.__version__ for module in (torch, transformers, peft)},
        }
        self.rows: dict[str, Row] = {}
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path and path.is_file() else []
        if path and lines and not lines[-1].endswith("\n"):  # the process was killed while it wrote
            path.write_text("".join(lines[:-1]), encoding="utf-8")
        for record in (json.loads(line) for line in lines if line.endswith("\n")):
            if {name: record[name] for name in self._found_with} == self._found_with:
                self.rows[record["model_type"]] = Row(**record["row"])

    def add(self, model_type: str, row: Row, seconds: float) -> None:
        """Keep a row, with the time that it took."""
        if self._path is None:
            return
        found = {"model_type": model_type, "seconds": round(seconds, 1), "row": dataclasses.asdict(row)}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(found | self._found_with) + "\n")


def markdown(rows: Mapping[str, Row]) -> str:
    """Table of all architectures, with the reasons below it."""
    reasons: dict[str, int] = {}

    def cell(row: Row, name: str) -> str:
        value = str(getattr(row, name))
        if row.packed != YES and name != "packed":
            return ""
        verdict, _, reason = value.partition("; ") if value.startswith(f"{YES}; ") else ("no", "", value)
        if name in ("mixing", "vllm") or (verdict == "no" and value.startswith((YES, NOT_RUN))):
            return value
        return f"{verdict} ({reasons.setdefault(reason, len(reasons) + 1)})"

    lines = [f"| `model_type` | {' | '.join(HEADINGS.values())} |", "|---" * (len(HEADINGS) + 1) + "|"]
    lines += [f"| `{name}` | {' | '.join(cell(row, column) for column in HEADINGS)} |" for name, row in rows.items()]
    return "\n".join([*lines, "", *(f"{number}. {reason}" for reason, number in reasons.items()), ""])


def rows_in(table: str) -> dict[str, Row]:
    """Rows of a table that ``markdown`` has printed."""
    found = re.findall(r"^(\d+)\. (.*)$", table, re.MULTILINE)
    reasons = {f"no ({number})": reason for number, reason in found}
    reasons |= {f"{YES} ({number})": f"{YES}; {reason}" for number, reason in found}

    def row(cells: str) -> Row:
        values = [reasons.get(cell, cell) for cell in cells.split(" | ")]
        return Row(**{name: value for name, value in zip(HEADINGS, values, strict=True) if value})

    return {
        name: row(cells) for name, cells in re.findall(r"^\| `((?!model_type)\S+)` \| (.*) \|$", table, re.MULTILINE)
    }


def main(arguments: list[str] | None = None) -> None:
    """Compare architectures, all if none is named; then the page in docs is written too."""
    parser = argparse.ArgumentParser(description="Packed batches against single samples, for each causal LM.")
    parser.add_argument("names", nargs="*", metavar="model_type", help="default: all")
    parser.add_argument("--no-compile", action="store_true", help="leave that column out")
    parser.add_argument("--results", type=Path, help="file that keeps the rows; the same command goes on with it")
    parser.add_argument("--write", action="store_true", help="also write the rows of the models that are named")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.names) - set(ARCHITECTURES)):
        parser.error(f"transformers {transformers.__version__} has no causal LM {unknown[0]!r}")
    columns = frozenset(HEADINGS) - ({"compile"} if options.no_compile else set())
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    results = ResultsFile(options.results, columns)
    rows = {name: _row(name, columns, results) for name in options.names or ARCHITECTURES}
    page = DOCS / "models.md"
    text = page.read_text(encoding="utf-8")
    if options.names:
        print(markdown(rows))
        rows = rows_in(text) | rows
    if options.write or not options.names:
        page.write_text(with_table(text, markdown(rows), BEGIN), encoding="utf-8")
    if options.names:
        return
    right = [name for name, row in rows.items() if row.packed == YES]
    print("compared:", " ".join(right))
    print("not in lit_ft.model.isolation.architectures:", sorted(set(right) ^ COMPARED))


def _row(name: str, columns: frozenset[str], results: ResultsFile) -> Row:
    if (known := results.rows.get(name)) is not None:
        return known
    began = time.monotonic()
    row = compare(name, columns)
    seconds = time.monotonic() - began
    results.add(name, row, seconds)
    print(f"{name}, {seconds:.1f} s: {row}", flush=True)
    return row


if __name__ == "__main__":
    main()
