"""Self-contained HTML report of a run."""

import json
import math
import os
import platform
import shlex
import sys
import time
from dataclasses import fields
from datetime import datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from jinja2 import TemplateError  # torch brings it
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from markupsafe import Markup

from lit_callbacks.durable_writes import write_durably
from lit_callbacks.either_package import is_a
from lit_callbacks.internals.lightning_internals import attributes_of
from lit_callbacks.output.printable import printable
from lit_callbacks.output.quantities import as_count, as_time
from lit_callbacks.peak_memory import device_peak, host_peak
from lit_callbacks.protocols import tokenizer_of
from lit_callbacks.report.first_batch import describe_batch, holds_tokens, write_first_batch
from lit_callbacks.report.headline import headline
from lit_callbacks.report.page import render_page
from lit_callbacks.report.report_data import ENVIRONMENT, FIRST_BATCH, LOG_FOLDERS, Json, Points, RunData, read_run
from lit_callbacks.report.report_plots import LOSS, chart_of, draw, sort_into_charts
from lit_callbacks.report.samples import by_prompt
from lit_callbacks.report.scored_answers import judge
from lit_callbacks.run_folder import run_folder

PACKAGES = (
    "torch",
    "lightning",
    "lit-ft-callbacks",
    "lit-ft",
    "transformers",
    "peft",
    "datasets",
    "tokenizers",
    "deepspeed",
)
"""Packages whose versions a report lists."""


class RunReport(Callback):
    """Write an HTML report of the run at the end of training.

    The report shows Lightning's ``metrics.csv`` and configuration, the files of the other callbacks of this package,
    and the first batch of texts, if the module or its data module has the attribute ``tokenizer``. The page needs no
    network, no script and no other file, and supports phones and dark mode. Curves need matplotlib (the extra
    ``plots``); without it the page has tables only.
    """

    def __init__(
        self,
        folder: str | Path | None = None,
        path: str | Path | None = None,
        title: str | None = None,
        began: float | None = None,
        first_batch: bool = True,
    ) -> None:
        """Set the run's folder, the report's path and title, the beginning of its time, and what of the data it shows.

        Args:
            folder: folder of the run; None is ``trainer.default_root_dir``.
            path: path of the HTML report; None is ``report.html`` in the folder of the run.
            title: title of the report; None is the name of the folder. A resumed run keeps its title.
            began: ``time.time()`` when the work for the run began; None is now.
            first_batch: whether to write the first batch; False keeps training data out of the report.
        """
        self.folder = None if folder is None else Path(folder)
        self.path = None if path is None else Path(path)
        self.title, self.first_batch = title, first_batch
        self._times = _PartTimes(time.time() if began is None else began)
        self._has_begun = False
        self._first_step = 0
        self._awaits_batch = False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the versions and devices of the run, which cannot be determined later."""
        if self._has_begun:  # the time of an earlier fit, and after it, is not of this one
            self._times = _PartTimes(time.time())
        self._has_begun = True
        if trainer.is_global_zero:
            self._note(trainer, started=_now(), ended=None)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the time in which data and model were prepared."""
        self._times.switch(BEFORE)
        self._first_step = trainer.global_step
        is_kept = trainer.global_step > 0 and (self._root(trainer) / FIRST_BATCH).exists()
        self._awaits_batch = self.first_batch and trainer.is_global_zero and not is_kept

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        """Write the first batch that holds tokens; a resumed run keeps that of its first start."""
        self._times.leave(BEFORE, TRAINING)  # resumed within an epoch, whose start Lightning does not announce again
        if not self._awaits_batch or (holds_tokens(batch) and batch["input_ids"].numel() == 0):
            return
        self._awaits_batch = False
        tokenizer = tokenizer_of(pl_module) or tokenizer_of(attributes_of(trainer).datamodule)
        if tokenizer is None or not holds_tokens(batch):
            return
        folder = self._root(trainer)
        try:
            write_first_batch(folder, describe_batch(batch, trainer.global_step, tokenizer))
        except Exception as error:  # a tokenizer or batch of an unusual kind must not end the run
            rank_zero_warn(f"RunReport cannot write the first batch to {str(folder)!r} ({error!r})")

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin the time of training."""
        self._times.switch(TRAINING)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin the time of a validation."""
        if not trainer.sanity_checking:
            self._times.switch(VALIDATION)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Continue the time of training."""
        if not trainer.sanity_checking:
            self._times.switch(TRAINING)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin the time of what callbacks do with the trained model: evaluation, export."""
        self._times.switch(AFTER)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the report, on rank 0."""
        self._times.switch(AFTER)
        if not trainer.is_global_zero:
            return
        for logger in trainer.loggers:
            logger.save()
        device = trainer.strategy.root_device
        self._note(
            trainer,
            ended=_now(),
            first_step=self._first_step,
            seconds={part: round(seconds, 3) for part, seconds in self._times.seconds.items()},
            peak_process_bytes=host_peak(),
            peak_device_bytes=device_peak(device),
        )
        folder = self._root(trainer)
        try:
            path, run = write_report(folder, self.path)
        except OSError as error:
            rank_zero_warn(f"RunReport cannot write its page to {str(folder)!r} ({error}); give path=")
            return
        except Exception as error:  # training has succeeded: a damaged file must not end the run with an error
            rank_zero_warn(f"RunReport cannot make a page of {str(folder)!r} ({type(error).__name__}: {error})")
            return
        rank_zero_info(f"report: {path}")
        if not any(len(points) > 1 and chart_of(name) == LOSS for name, points in run.curves.items()):
            rank_zero_warn(f"RunReport: no curve of a loss; {self._how_to_log_one(trainer, run)}")

    def _how_to_log_one(self, trainer: Trainer, run: RunData) -> str:
        if not run.curves and not any(is_a(logger, CSVLogger) for logger in trainer.loggers):
            return "curves are those of metrics.csv, which no logger of this run writes; add a CSVLogger"
        every, steps = trainer.log_every_n_steps, trainer.global_step - self._first_step  # type: ignore[attr-defined]
        if not 0 < steps < 2 * every:  # one point is no curve
            return "log one as 'train/loss', say"
        advice = "lower log_every_n_steps" if every > 1 else "train longer"
        return f"the run took {as_count(steps, 'step')} and logs at intervals of {every}; {advice}"

    def _root(self, trainer: Trainer) -> Path:
        return self.folder or run_folder(trainer)

    def _note(self, trainer: Trainer, **noted: object) -> None:
        path = self._root(trainer) / ENVIRONMENT
        try:
            known = _noted_before(path)
            path.parent.mkdir(parents=True, exist_ok=True)
            noted["title"] = known.get("title") or self.title
            noted[LOG_FOLDERS] = [
                os.path.relpath(log_dir, path.parent)
                for logger in trainer.loggers
                if isinstance(log_dir := getattr(logger, "log_dir", None), str)
            ]
            write_durably(path, json.dumps(known | describe(trainer) | noted, indent=1) + "\n")
        except (OSError, ValueError, TypeError) as error:
            rank_zero_warn(f"RunReport cannot note versions in {str(path)!r} ({error}); give folder=")


def _noted_before(path: Path) -> dict[str, object]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}
    except (ValueError, TypeError) as error:
        rank_zero_warn(f"RunReport replaces the damaged file {str(path)!r} ({type(error).__name__}: {error})")
        return {}


class _PartTimes:
    """Seconds of the parts of a run, one after the other."""

    def __init__(self, began: float) -> None:
        self.seconds: dict[str, float] = {}
        self._part, self._since = START, began

    def leave(self, part: str, following: str) -> None:
        """Begin another part if a certain one goes on."""
        if self._part == part:
            self.switch(following)

    def switch(self, part: str) -> None:
        """End the current part and begin another."""
        now = time.time()
        self.seconds[self._part] = self.seconds.get(self._part, 0.0) + now - self._since
        self._part, self._since = part, now


START = "start: imports, data, model"
BEFORE = "callbacks before the first step"
TRAINING = "training"
VALIDATION = "validation"
AFTER = "callbacks after the last step"


def describe(trainer: Trainer) -> Json:
    """Environment of a run: command, device, strategy, precision, optimizer steps, versions."""
    device = trainer.strategy.root_device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "command": shlex.join([Path(sys.orig_argv[0]).name, *sys.orig_argv[1:]]),
        "folder": os.getcwd(),
        "device": f"{trainer.world_size} x {device.type} ({name})",
        "strategy": type(trainer.strategy).__name__,
        "precision": str(trainer.precision),
        "optimizer_steps": trainer.global_step,
        "versions": {
            "python": platform.python_version(),
            "system": platform.platform(),
            **installed_versions(PACKAGES),
        },
    }


def write_report(folder: str | Path, path: str | Path | None = None) -> tuple[Path, RunData]:
    """Write the report of a run's folder.

    Args:
        folder: folder of the run.
        path: path of the HTML report; None is ``report.html`` in the folder of the run.

    Returns:
        Path of the report, and the data of the run.
    """
    run = read_run(Path(folder))
    path = Path(path or run.folder / "report.html")
    _write_page(path, printable(render(run)))
    return path, run


def _write_page(path: Path, page: str) -> None:
    """Write a page, or leave the earlier one where the disk is full."""
    if path.exists() and not path.is_file():
        path.write_text(page, encoding="utf-8")  # a device or a pipe, as /dev/stdout
        return
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        temporary.write_text(page, encoding="utf-8")
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def render(run: RunData) -> str:
    """HTML of the report; a damaged part is left out and named in ``run.missing``."""
    try:
        return _render(run)
    except _DAMAGE:
        for part in (field.name for field in fields(RunData) if field.name not in ("folder", "config", "missing")):
            try:
                _render(RunData(run.folder, **{part: getattr(run, part)}))
            except _DAMAGE as error:
                run.missing.append(f"the run's {part}: the file is damaged ({type(error).__name__}: {error})")
                setattr(run, part, type(getattr(RunData(run.folder), part))())
        return _render(run)


_DAMAGE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, TemplateError)
"""Errors that values of unexpected types may cause."""


def _render(run: RunData) -> str:
    charts = sort_into_charts(run.curves)
    if len(run.forgetting) > 1:
        points = [(line["step"], line["loss"]) for line in run.forgetting]
        charts["loss on general text", "nats"] = {"forgetting/loss": points}
    notes = list(run.missing)
    try:
        pictures = [
            (printable(title, one_line=True), Markup(draw(title, unit, curves)))
            for (title, unit), curves in charts.items()
        ]
    except ModuleNotFoundError as error:
        pictures = []
        notes.append(f"no curves: {error.name} is missing; pip install 'lit-ft-callbacks[plots]'")
    seconds = run.environment.get("seconds") or {}
    return render_page(
        Path(__file__).with_name("report.html.j2"),
        run.environment.get("title") or run.folder.resolve().name,
        run=run,
        headline=headline(run),
        pictures=pictures,
        metrics=[(name, *_extent(points)) for name, points in sorted(run.curves.items())],
        prompts=by_prompt(run.samples),
        judged=judge(run.scored),
        notes=notes,
        facts=_facts(run),
        times=[(part, value, as_time(value)) for part, value in seconds.items()],
    )


def _extent(points: Points) -> tuple[float, float, float, float]:
    finite = [value for _, value in points if math.isfinite(value)] or [math.nan]
    return points[0][1], points[-1][1], min(finite), max(finite)


def _facts(run: RunData) -> list[str]:
    """Device, strategy, precision and dates of a run."""
    about = run.environment
    facts = [str(run.folder), *(str(about[key]) for key in ("device", "strategy") if about.get(key))]
    return facts + [f"{key} {about[key]}" for key in ("precision", "started") if about.get(key) not in (None, "")]


@cache
def installed_versions(packages: tuple[str, ...]) -> dict[str, str]:
    """Versions of those of the packages that are installed, torch's with the version of CUDA that it was built for."""
    versions = {}
    for package in packages:
        try:
            versions[package] = str(torch.__version__) if package == "torch" else version(package)
        except PackageNotFoundError:
            continue
    return versions


def _now() -> str:
    return datetime.now().astimezone().isoformat(" ", "seconds")
