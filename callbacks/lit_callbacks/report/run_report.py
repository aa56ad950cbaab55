"""Self-contained HTML report of a run."""

import json
import math
import platform
import sys
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, TemplateError  # torch brings it
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from markupsafe import Markup

from lit_callbacks.output.printable import printable
from lit_callbacks.report.report_data import ENVIRONMENT, Json, Points, RunData, read_run
from lit_callbacks.report.report_plots import draw, sort_into_charts

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

    The report shows Lightning's ``metrics.csv`` and configuration, and the files of the other callbacks of this
    package. The page needs no network, no script and no other file, and supports phones and dark mode. Curves need
    matplotlib (the extra ``plots``); without it the page has tables only.
    """

    def __init__(self, folder: str | Path | None = None, path: str | Path | None = None) -> None:
        """Set the run's folder and the report's path.

        Args:
            folder: folder of the run; None is ``trainer.default_root_dir``.
            path: path of the HTML report; None is ``report.html`` in the folder of the run.
        """
        self.folder = None if folder is None else Path(folder)
        self.path = None if path is None else Path(path)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the versions and devices of the run, which cannot be determined later."""
        if trainer.is_global_zero:
            self._note(trainer, started=_now(), ended=None)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the report, on rank 0."""
        if not trainer.is_global_zero:
            return
        for logger in trainer.loggers:
            logger.save()
        self._note(trainer, ended=_now())
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
        if not any(title == "loss" for title, _ in sort_into_charts(run.curves)):
            rank_zero_warn("RunReport: no curve of a loss was logged; log one as 'train/loss', say, with a CSVLogger")

    def _root(self, trainer: Trainer) -> Path:
        return self.folder or Path(trainer.default_root_dir)

    def _note(self, trainer: Trainer, **times: str | None) -> None:
        path = self._root(trainer) / ENVIRONMENT
        try:
            known = dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(known | describe(trainer) | times, indent=1) + "\n", encoding="utf-8")
        except (OSError, ValueError, TypeError) as error:
            rank_zero_warn(f"RunReport cannot note versions in {str(path)!r} ({error}); give folder=")


def describe(trainer: Trainer) -> Json:
    """Environment of a run: command, device, strategy, precision, optimizer steps, versions."""
    import torch

    device = trainer.strategy.root_device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "command": " ".join(sys.argv),
        "device": f"{trainer.world_size} x {device.type} ({name})",
        "strategy": type(trainer.strategy).__name__,
        "precision": str(trainer.precision),
        "optimizer_steps": trainer.global_step,
        "versions": {"python": platform.python_version(), "system": platform.platform(), **_versions()},
    }


def write_report(folder: Path, path: Path | None = None) -> tuple[Path, RunData]:
    """Write the report of a run's folder.

    Args:
        folder: folder of the run.
        path: path of the HTML report; None is ``report.html`` in the folder of the run.

    Returns:
        Path of the report, and the data of the run.
    """
    run = read_run(folder)
    path = path or folder / "report.html"
    path.write_text(printable(render(run)), encoding="utf-8")
    return path, run


def render(run: RunData) -> str:
    """HTML of the report; a damaged part is left out and named in ``run.missing``."""
    try:
        return _render(run)
    except _DAMAGE:
        for part in ("curves", "environment", "samples", "ledger", "forgetting", "spikes"):
            try:
                _render(RunData(run.folder, **{part: getattr(run, part)}))
            except _DAMAGE as error:
                run.missing.append(f"the run's {part}: the file is damaged ({type(error).__name__}: {error})")
                setattr(run, part, type(getattr(RunData(run.folder), part))())
        return _render(run)


_DAMAGE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, TemplateError)
"""Errors that values of unexpected types may cause."""


def _render(run: RunData) -> str:
    loader = FileSystemLoader(Path(__file__).parent)
    page = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    page.filters["number"] = _number
    charts = sort_into_charts(run.curves)
    if len(run.forgetting) > 1:
        points = [(line["step"], line["loss"]) for line in run.forgetting]
        charts["loss on general text", "nats"] = {"forgetting/loss": points}
    notes = list(run.missing)
    try:
        pictures = [(title, Markup(draw(title, unit, curves))) for (title, unit), curves in charts.items()]
    except ModuleNotFoundError as error:
        pictures = []
        notes.append(f"no curves: {error.name} is missing; pip install 'lit-ft-callbacks[plots]'")
    return page.get_template("report.html.j2").render(
        run=run,
        name=run.folder.resolve().name,
        pictures=pictures,
        metrics=[(name, *_extent(points)) for name, points in sorted(run.curves.items())],
        prompts=_by_prompt(run),
        notes=notes,
        facts=_facts(run),
    )


def _extent(points: Points) -> tuple[float, float, float, float]:
    finite = [value for _, value in points if math.isfinite(value)] or [math.nan]
    return points[0][1], points[-1][1], min(finite), max(finite)


def _by_prompt(run: RunData) -> dict[str, list[tuple[int, str]]]:
    answers: dict[str, list[tuple[int, str]]] = {}
    for line in run.samples:
        answers.setdefault(line["prompt"], []).append((line["step"], line["answer"]))
    return answers


def _facts(run: RunData) -> Json:
    """Environment and loss on general text, by label, for the top of the page."""
    about = {key: value for key, value in run.environment.items() if key != "versions" and value not in (None, "")}
    if len(run.forgetting) > 1:
        before, after = run.forgetting[0]["loss"], run.forgetting[-1]["loss"]
        about["general text"] = f"{before:.3f} nats per token before, {after:.3f} after ({after - before:+.3f})"
    return {key.replace("_", " "): value for key, value in about.items()}


def _number(value: object) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else "" if value is None else str(value)


def _versions() -> dict[str, str]:
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def _now() -> str:
    return datetime.now().astimezone().isoformat(" ", "seconds")
