"""Files of a run's folder, read for the report."""

import csv
import json
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from os import SEEK_END
from pathlib import Path
from typing import Any, TypeVar

from lit_callbacks.output.logged_rows import counts_from_zero
from lit_callbacks.output.step_lines import read_lines
from lit_callbacks.report.tables import ReportTable, newest_tables, read_table

ENVIRONMENT = "environment.json"
"""File name of the versions, devices and times of a run, which ``RunReport`` writes."""
LOG_FOLDERS = "log_folders"
"""Key there of the folders of the run's loggers, relative to its own, which may hold logs of other runs too."""
FIRST_BATCH = "first_batch.json"
"""File name of the first batch, which ``RunReport`` writes."""
VALIDATION_ANSWERS = "validation_answers.jsonl"
"""File name of answers to held-out questions, each judged (``scored_answers``)."""
LAST_BYTES = 2**14
"""Size of the end of ``metrics.csv`` that ``read_last_metrics`` tries first: some 40 lines."""
Points = list[tuple[float, float]]
"""Points of a curve: completed optimizer steps and value."""
Json = dict[str, Any]
"""JSON object of a file that a callback has written, which may have been damaged since."""
_Content = TypeVar("_Content")


@dataclass
class RunData:
    """Data of a run; a part that was not found is empty and named in ``missing``."""

    folder: Path
    curves: dict[str, Points] = field(default_factory=dict)
    """Points of logged metrics by name."""
    config: str = ""
    environment: Json = field(default_factory=dict)
    samples: list[Json] = field(default_factory=list)
    """Lines of ``SampleGenerations``: step, prompt, answer, and the expected one where it is known."""
    scored: list[Json] = field(default_factory=list)
    """Lines of ``scored_answers.write_answers``: step, question, expected answer, answer, and whether it is right."""
    first_batch: Json = field(default_factory=dict)
    """The ``first_batch.FirstBatch`` of the run."""
    tables: dict[str, ReportTable] = field(default_factory=dict)
    """The newest table of each kind that later commands have written, by kind."""
    ledger: Json = field(default_factory=dict)
    """Summary of ``LossLedger``."""
    forgetting: list[Json] = field(default_factory=list)
    """Lines of ``ForgettingProbe``: step, loss and tokens."""
    spikes: list[Json] = field(default_factory=list)
    """Evidence files of ``SpikeGuard``, of rank 0."""
    missing: list[str] = field(default_factory=list)
    """Messages on parts that could not be read, each with the way to get them."""


def read_run(folder: Path) -> RunData:
    """Read a run's folder; a missing or damaged file leaves its part empty."""
    run = RunData(folder)

    def read(path: Path | None, reader: Callable[[Path], _Content], otherwise: _Content, hint: str) -> _Content:
        if path is None or not path.exists():
            run.missing.append(hint)
            return otherwise
        try:
            return reader(path)
        except (OSError, ValueError, KeyError, RecursionError, csv.Error) as error:
            run.missing.append(f"{path.name} cannot be read ({type(error).__name__}: {error})")
            return otherwise

    run.environment = read(folder / ENVIRONMENT, _json, {}, "no versions: RunReport was not among the run's callbacks")
    named = run.environment.get(LOG_FOLDERS)
    logs = named if isinstance(named, list) else None
    run.curves = read(_newest(folder, "metrics.csv", logs), read_metrics, {}, "no metrics.csv: add a CSVLogger")
    config = _newest(folder, "config.yaml", logs) or _newest(folder, "hparams.yaml", logs)
    run.config = read(config, _text, "", "no config.yaml or hparams.yaml: call self.save_hyperparameters()")
    run.samples = read(folder / "samples.jsonl", read_lines, [], "no answers: add SampleGenerations")
    run.scored = read(folder / VALIDATION_ANSWERS, read_lines, [], _NO_SCORED)
    run.first_batch = read(folder / FIRST_BATCH, _json, {}, _NO_BATCH)
    for kind, path in newest_tables(folder).items():
        if (table := read(path, read_table, None, "")) is not None:
            run.tables[kind] = table
    run.ledger = read(folder / "loss_ledger" / "summary.json", _json, {}, "no losses of samples: add LossLedger")
    run.forgetting = read(folder / "forgetting.jsonl", read_lines, [], "no loss on general text: add ForgettingProbe")
    nothing: Json = {}
    for path in sorted(folder.glob("spikes/*.rank0.json")):
        run.spikes += [evidence] if (evidence := read(path, _json, nothing, "")) else []
    return run


_NO_SCORED = "no validation answers: write them by lit_callbacks.report.scored_answers, as lit_ft.ExactMatch does"
_NO_BATCH = "no first batch: RunReport needs a module or data module with a tokenizer, and batches with input_ids"


def read_metrics(path: Path) -> dict[str, Points]:
    """Curves of Lightning's ``metrics.csv`` by metric name, over the completed optimizer steps.

    A value that is not a number becomes NaN.
    """
    with path.open(newline="", encoding="utf-8") as file:
        return _curves(file)


def read_last_metrics(path: Path, names: Collection[str]) -> dict[str, Points]:
    """Curves of the last lines of ``metrics.csv``, of so many that each metric of ``names`` in the file has a point."""
    block = LAST_BYTES
    with path.open("rb") as file:
        header = file.readline()
        begin, end = file.tell(), file.seek(0, SEEK_END)
        named = set(next(csv.reader([header.decode("utf-8")]), [])) & set(names)
        while True:
            file.seek(start := max(end - block, begin))
            lines = file.read(end - start).splitlines(keepends=True)
            curves = _curves(line.decode("utf-8") for line in (header, *lines[start > begin :]))
            if start == begin or named <= curves.keys():
                return curves
            block *= 4


def _curves(lines: Iterable[str]) -> dict[str, Points]:
    curves: dict[str, Points] = defaultdict(list)
    for line, read in enumerate(csv.DictReader(lines)):
        row = {name: value for name, value in read.items() if name is not None}  # more values than columns
        step = float(row.get("step") or line) + counts_from_zero(row)
        for name, value in row.items():
            if name not in ("step", "epoch") and value:
                curves[name].append((step, _number(value)))
    return dict(curves)


def _number(value: str) -> float:
    try:
        return float(value)
    except ValueError:
        return math.nan


def _newest(folder: Path, name: str, logs: list[str] | None) -> Path | None:
    """Path of a file in the folder itself, else of the newest in folders of the run's loggers.

    Where these are not known, of the newest in all subfolders: loggers number their versions.
    """
    if (folder / name).exists():
        return folder / name
    found = folder.rglob(name) if logs is None else (path for log in logs if (path := folder / log / name).exists())
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _json(path: Path) -> Json:
    content: Json = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError("it holds no JSON object")
    return content
