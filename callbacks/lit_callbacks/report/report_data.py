"""What a run's folder holds that a report shows."""

import csv
import json
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lit_callbacks.output.step_lines import read_lines

ENVIRONMENT = "environment.json"
"""Versions, devices and times of a run, as ``RunReport`` writes them."""
Points = list[tuple[float, float]]
"""Optimizer steps and values."""


@dataclass
class RunData:
    """Everything that was found; what was not is empty, and named in ``missing``."""

    folder: Path
    curves: dict[str, Points] = field(default_factory=dict)
    """Logged metrics by name."""
    config: str = ""
    environment: dict[str, Any] = field(default_factory=dict)
    samples: list[dict[str, Any]] = field(default_factory=list)
    """Lines of ``SampleGenerations``."""
    ledger: dict[str, Any] = field(default_factory=dict)
    """Summary of ``LossLedger``."""
    forgetting: list[dict[str, Any]] = field(default_factory=list)
    """Lines of ``ForgettingProbe``."""
    spikes: list[dict[str, Any]] = field(default_factory=list)
    """Evidence of ``SpikeGuard``, of rank 0."""
    missing: list[str] = field(default_factory=list)
    """What could not be read, and what would make it be there."""


def read_run(folder: Path) -> RunData:
    """Read a run's folder; a file that is not there or is broken leaves its part empty."""
    run = RunData(folder)

    def read(path: Path | None, reader: Callable[[Path], Any], otherwise: Any, hint: str) -> Any:
        if path is None or not path.exists():
            run.missing.append(hint)
            return otherwise
        try:
            return reader(path)
        except (OSError, ValueError, KeyError) as error:
            run.missing.append(f"{path.name} cannot be read ({type(error).__name__}: {error})")
            return otherwise

    run.curves = read(_newest(folder, "metrics.csv"), read_metrics, {}, "no metrics.csv: add a CSVLogger")
    config = _newest(folder, "config.yaml") or _newest(folder, "hparams.yaml")
    run.config = read(config, _text, "", "no config.yaml or hparams.yaml: call self.save_hyperparameters()")
    run.environment = read(folder / ENVIRONMENT, _json, {}, "no versions: RunReport was not among the run's callbacks")
    run.samples = read(folder / "samples.jsonl", read_lines, [], "no answers: add SampleGenerations")
    run.ledger = read(folder / "loss_ledger" / "summary.json", _json, {}, "no losses of samples: add LossLedger")
    run.forgetting = read(folder / "forgetting.jsonl", read_lines, [], "no loss on general text: add ForgettingProbe")
    for path in sorted(folder.glob("spikes/*.rank0.json")):
        run.spikes += [found] if (found := read(path, _json, None, "")) else []
    return run


def read_metrics(path: Path) -> dict[str, Points]:
    """Curves of Lightning's ``metrics.csv``; a value that is not a number is NaN."""
    curves: dict[str, Points] = defaultdict(list)
    with path.open(newline="", encoding="utf-8") as file:
        for place, row in enumerate(csv.DictReader(file)):
            step = float(row.get("step") or place)
            for name, value in row.items():
                if name not in ("step", "epoch", None) and value:
                    curves[name].append((step, _number(value)))
    return dict(curves)


def _number(value: str) -> float:
    try:
        return float(value)
    except ValueError:
        return math.nan


def _newest(folder: Path, name: str) -> Path | None:
    """The file in the folder itself, else the newest below: loggers number their versions."""
    if (folder / name).exists():
        return folder / name
    return max(folder.rglob(name), key=lambda path: path.stat().st_mtime, default=None)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
