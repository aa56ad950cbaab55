"""Loggers of a run: ``metrics.csv``, TensorBoard with one event per step, and those of the recipe beside them."""

import csv
import io
import os
import re
import sys
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning.pytorch import loggers as lightning_loggers
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only, rank_zero_warn
from lit_callbacks.durable_writes import write_durably
from lit_callbacks.output.logged_rows import counts_from_zero
from lit_callbacks.output.quantities import as_count
from tensorboard.compat.proto.summary_pb2 import Summary
from torch import Tensor
from torch.utils.tensorboard.summary import hparams

from lit_ft.checkpointing.storage.failures import explain_failed_write
from lit_ft.errors import RecipeError, explained
from lit_ft.internals.lightning import rank
from lit_ft.run.folder import RunFolder


class MetricsCSV(CSVLogger):
    """``metrics.csv`` in the run folder; a resumed run appends to it, after removing lines of steps that it repeats."""

    def __init__(self, run: RunFolder, resumed_step: int = 0, unlogged: Set[str] | None = None) -> None:
        """Log into a run folder.

        Args:
            run: run folder.
            resumed_step: number of optimizer steps of the checkpoint that the run resumes from; 0 for a new run.
            unlogged: metrics of the checkpoint's last step that were not logged when it was written; None: all were.
        """
        # Lightning saves after its own logging, which is the last of a logged step, so a killed process loses none of
        # it. Values that a callback logs between such steps are written with the next.
        super().__init__(run.root, name="", version="", flush_logs_every_n_steps=sys.maxsize)
        self.resumed_step, self.unlogged = resumed_step, unlogged

    def log_hyperparams(self, params: object = None) -> None:
        """Write nothing: the run folder has ``config.yaml``."""

    @property
    def experiment(self) -> ExperimentWriter:
        """Writer of the file."""
        if self._experiment is None and rank() == 0:
            self._experiment = _MetricsFile(self.log_dir, self.resumed_step, self.unlogged)
        return super().experiment


class _MetricsFile(ExperimentWriter):
    """Writer that appends lines; if a new column needs another header, the file is replaced atomically."""

    def __init__(self, folder: str, resumed_step: int, unlogged: Set[str] | None) -> None:
        self._resumed_step, self._unlogged, self._is_begun = resumed_step, unlogged, False
        super().__init__(folder)

    def _check_log_dir_exists(self) -> None:
        """Leave the file as it is, which Lightning's own method deletes."""

    def _drop_repeated(self, path: Path) -> None:
        """Remove lines of steps after the checkpoint, once: not before the first new one, as a run may be refused."""
        self._is_begun = True
        if not path.is_file():
            return
        kept, dropped = rows_before(self._resumed_step, self._unlogged, read_rows(path))
        self.metrics_keys = sorted({key for row in kept for key in row})
        self._replace(kept)
        if later := rows_before(self._resumed_step, None, dropped)[1]:  # others are logged again from the checkpoint
            rank_zero_info(
                f"{path} is without {as_count(len(later), 'row')} of steps after {self._resumed_step:,}, which the run "
                "resumes from: it trains and logs these steps again"
            )

    def save(self) -> None:
        """Write the values logged since the last call.

        Raises:
            RecipeError: the file cannot be written.
        """
        path = Path(self.metrics_file_path)
        if self.metrics:
            with explain_failed_write(path):
                if not self._is_begun:
                    self._drop_repeated(path)
                self._append(path)

    def _append(self, path: Path) -> None:
        if self.metrics_keys and not path.is_file() and path.parent.is_dir():
            rank_zero_warn(f"{path} was removed while the run ran, with the rows before this one; a new one is begun")
        rows = list(self.metrics)
        columns = sorted({*self.metrics_keys, *(key for row in rows for key in row)})
        if columns != self.metrics_keys or not path.is_file():
            earlier = read_rows(path) if path.is_file() else []
            self.metrics_keys = columns
            self._replace([*earlier, *rows])
        else:
            _append_all_or_nothing(path, _as_csv(columns, rows))
        self.metrics = []

    def _replace(self, rows: Sequence[Mapping[str, object]]) -> None:
        text = _as_csv(self.metrics_keys, [dict(zip(self.metrics_keys, self.metrics_keys, strict=True)), *rows])
        write_durably(Path(self.metrics_file_path), text)


def _as_csv(columns: list[str], rows: Sequence[Mapping[str, object]]) -> str:
    text = io.StringIO()
    csv.DictWriter(text, columns).writerows(rows)
    return text.getvalue()


def read_rows(path: Path) -> list[dict[str, str]]:
    """Lines of a metrics file, each with its non-empty values; incomplete lines (kill, full disk) are left out."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    columns, *rows = list(csv.reader(line for line in lines if line.endswith("\n"))) or [[]]
    complete = [dict(zip(columns, row, strict=True)) for row in rows if len(row) == len(columns)]
    return [{key: value for key, value in row.items() if value != ""} for row in complete]


def rows_before(
    step: int, unlogged: Set[str] | None, rows: list[dict[str, str]]
) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Lines that were logged before a checkpoint was written, and later ones.

    Where Lightning counts, from 0, ``step - 1`` is the last one before the checkpoint. Of that one, the lines with an
    epoch from the first with ``unlogged`` metrics on are later. Other lines have a number of completed steps.
    """
    kept: list[dict[str, str]] = []
    dropped: list[dict[str, str]] = []
    names = None if unlogged is None else unlogged - {"epoch"}
    is_later = False
    for row in rows:
        number = int(row["step"]) if str(row.get("step")).isdigit() else step + 1
        if names is not None and "epoch" in row and number == step - 1:
            is_later = is_later or not names or not names.isdisjoint(row)
            number += is_later
        is_before = step > 0 and number <= step - counts_from_zero(row)
        (kept if is_before else dropped).append(row)
    return kept, dropped


class StepEvents(TensorBoardLogger):
    """TensorBoard logger that writes one event for all metrics of a call.

    TensorBoard's queue holds ten events, and the training thread waits when it is full: its writer thread computes
    checksums in Python.
    """

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Write the metrics of a step; if one is not a number, Lightning's logger writes them one by one."""
        with explain_failed_write(Path(self.log_dir)):
            self._write(metrics, step)

    @rank_zero_only
    def log_hyperparams(  # type: ignore[override]
        self, params: Mapping[str, object], metrics: Mapping[str, object] | None = None, step: int | None = None
    ) -> None:
        """Write options for TensorBoard's HPARAMS page, beside the last ``val/loss`` and ``train/loss`` of the run.

        Nested options get names with slashes; the names of ``metrics`` are those of further ones on the page.
        """
        self.hparams.update(params)  # hparams.yaml, which the first save writes
        if (file := self.experiment.file_writer) is not None:
            names = dict.fromkeys(["val/loss", "train/loss", *(metrics or {})], 0.0)
            for summary in hparams(_flat(params), names):
                file.add_summary(summary, step)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Write the remaining events.

        Raises:
            RecipeError: they cannot be written, and no earlier error has ended the run.
        """
        try:
            with explain_failed_write(Path(self.log_dir)):
                super().finalize(status)
        except RecipeError as error:
            if status != "failed":
                raise
            rank_zero_warn(str(error))  # an exception would take the place of the one that ended the run

    def _write(self, metrics: Mapping[str, float], step: int | None) -> None:
        file = self.experiment.file_writer
        if file is None or self._prefix or not all(isinstance(v, int | float | Tensor) for v in metrics.values()):
            super().log_metrics(metrics, step)
            return
        values = [Summary.Value(tag=name, simple_value=float(value)) for name, value in metrics.items()]
        file.add_summary(Summary(value=values), step)


class LitLogger(lightning_loggers.LitLogger, Logger):
    """Lightning's logger for lightning.ai, as a subclass of the class that ``trainer.logger`` admits."""

    @property
    def experiment(self) -> Any:
        """Experiment on lightning.ai; the first access logs in, before any weights are read.

        Raises:
            RecipeError: nobody is logged in, and there is no network or no browser to do so.
        """
        with explained(
            "trainer.logger: LitLogger", "run `lightning login` once where there is a network, or leave it out"
        ):
            return super().experiment


def _flat(options: Mapping[str, object], prefix: str = "") -> dict[str, bool | int | float | str]:
    """Options without nesting, as numbers, booleans and text; those that are not set are left out."""
    flat: dict[str, bool | int | float | str] = {}
    for name, value in options.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{name}/")
        elif value is not None:
            flat[f"{prefix}{name}"] = value if isinstance(value, bool | int | float | str) else str(value)
    return flat


def beside_defaults(given: object, run: RunFolder, resumed_step: int, unlogged: Set[str] | None) -> list[Logger]:
    """Loggers of a run: ``metrics.csv``, and TensorBoard unless the recipe has one of its kind; then the recipe's.

    Commands read the file, so a ``CSVLogger`` of the recipe takes its place only where it writes the same one.

    Args:
        given: the recipe's ``trainer.logger``.
        run: run folder.
        resumed_step: that of ``MetricsCSV``.
        unlogged: that of ``MetricsCSV``.
    """
    loggers = [one for one in (given if isinstance(given, list) else [given]) if isinstance(one, Logger)]
    if resumed_step > 0:
        _say_new_versions(loggers)
        _say_what_stays(loggers, run.root / "metrics.csv", resumed_step, unlogged)
    defaults: list[Logger] = []
    if not any(isinstance(one, CSVLogger) and _is_same(one.log_dir, run.root) for one in loggers):
        defaults.append(MetricsCSV(run, resumed_step, unlogged))
    if not any(isinstance(one, TensorBoardLogger) for one in loggers):
        hides = resumed_step if _has_later_rows(run.root, resumed_step) else None
        defaults.append(StepEvents(run.root, name="tensorboard", version="", purge_step=hides))
    return defaults + loggers


def _is_same(folder: str, other: Path) -> bool:
    return os.path.realpath(folder) == os.path.realpath(other)


def _say_new_versions(loggers: list[Logger]) -> None:
    """Say where loggers of the recipe that number their folders write what a resumed run logs."""
    for logger in loggers:
        if not isinstance(logger, CSVLogger | TensorBoardLogger):
            continue
        folder = Path(logger.log_dir)
        if re.fullmatch(r"version_\d+", folder.name) and not folder.exists():
            rank_zero_info(
                f"trainer.logger: {type(logger).__name__} writes into {folder} from here on: it begins a folder at "
                "each resumption, and earlier steps are in those beside it"
            )


def _say_what_stays(loggers: list[Logger], file: Path, resumed_step: int, unlogged: Set[str] | None) -> None:
    """Say which loggers keep values of steps that a resumed run logs again; others begin a file, or hide the values."""
    later = rows_before(resumed_step, unlogged, read_rows(file))[1] if file.is_file() else []
    others = [type(one).__name__ for one in loggers if not isinstance(one, CSVLogger | TensorBoardLogger)]
    if others and later:
        steps = (int(row["step"]) for row in later if str(row.get("step")).isdigit())
        first = min(steps, default=resumed_step)
        names = ", ".join(dict.fromkeys(others))
        rank_zero_info(f"{names}: what was logged from step {first:,} on stays there, beside what is logged again")


def _has_later_rows(folder: Path, resumed_step: int) -> bool:
    """Whether TensorBoard is to hide what was logged from a step on: not what was measured at the end of a run."""
    file = folder / "metrics.csv"
    return resumed_step > 0 and (not file.is_file() or bool(rows_before(resumed_step, None, read_rows(file))[1]))


def _append_all_or_nothing(path: Path, text: str) -> None:
    size = path.stat().st_size
    try:
        with path.open("a", encoding="utf-8", newline="") as file:
            file.write(text)
    except OSError:
        # On a full disk a part of a line may be written, and Lightning writes once more when the run fails.
        with suppress(OSError):
            os.truncate(path, size)
        raise
