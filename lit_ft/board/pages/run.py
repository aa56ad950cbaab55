"""Page of a run: its state, curves, samples and console, and what is done with it."""

import asyncio
import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from fastapi import Request
from lit_callbacks.output.quantities import MIB, as_size, as_time
from lit_callbacks.output.step_lines import read_lines
from lit_callbacks.report.report_data import VALIDATION_ANSWERS, Points
from nicegui import ui

from lit_ft.board.board import Board, shown
from lit_ft.board.pages.charts import Chart
from lit_ft.board.pages.chat import ChatPanel
from lit_ft.board.pages.export import ExportPanel
from lit_ft.board.pages.frame import POLL_SECONDS, ago, figure, frame, number, shown_errors, texts_of
from lit_ft.board.processes import log_tail
from lit_ft.board.runs import Summary, log_of, title_of
from lit_ft.board.texts import Texts
from lit_ft.errors import RecipeError
from lit_ft.run.folder import RunFolder

SHOWN_SAMPLES = 40
_LATER = ("throughput/", "memory/")
"""Beginnings of metrics that come last in the list of others."""
_FIRST = {
    "chart loss": ("train/loss", "val/loss"),
    "chart rate": ("train/learning_rate",),
    "chart speed": ("throughput/tokens_per_second", "throughput/supervised_tokens_per_second"),
    "chart memory": ("memory/peak_allocated_mib", "memory/host_rss_mib"),
}


def register(board: Board) -> None:
    """Add the page."""

    @ui.page("/run/{name:path}")
    async def page(request: Request, name: str) -> None:
        texts = texts_of(request)
        try:
            folder = await asyncio.to_thread(board.runs.folder, name)
        except RecipeError as error:
            ui.status_code(404)
            with frame(texts, texts("run"), "404"):
                ui.label(str(error)).classes("card")
            return
        with frame(texts, texts("run"), title_of(name, folder)):
            view = _RunView(board, texts, name, folder)
            await view.update()
            ui.timer(POLL_SECONDS, view.update)


class _RunView:
    """Everything on the page that changes while a run runs."""

    def __init__(self, board: Board, texts: Texts, name: str, folder: RunFolder) -> None:
        self._board, self._texts, self._name, self._folder = board, texts, name, folder
        self._environment: dict[str, Any] = {}
        self._state = ui.label().classes("state").props('data-mark="state"')
        self._failure = ui.label().classes("bad").props('data-mark="failure"')
        self._place = ui.label().classes("quiet")
        grid = ui.element("div").classes("figures")
        labels = ("step", "loss", "val loss", "speed", "memory", "time")
        self._figures = {label: figure(grid, texts(label)) for label in labels}
        self._buttons()
        with ui.tabs().props("align=left inline-label outside-arrows mobile-arrows").classes("w-full") as tabs:
            names = ("curves", "samples", "console", "chat", "export", "recipe")
            for one in names:
                ui.tab(one, texts(one)).props(f'data-mark="tab {one}"')
        with ui.tab_panels(tabs, value="curves", animated=False, keep_alive=True).classes("w-full"):
            self._panels()

    def _buttons(self) -> None:
        texts = self._texts
        with ui.element("div").classes("bar").style("margin-bottom: 1rem"):
            self._stop = ui.button(texts("stop"), icon="stop", color="negative", on_click=self._ask_to_stop)
            self._resume = ui.button(texts("resume"), icon="play_arrow", on_click=self._do_resume)
            for button, mark in ((self._stop, "stop"), (self._resume, "resume")):
                button.props("unelevated").props(f'data-mark="{mark}"')
            self._write = ui.button(texts("write report"), icon="description", on_click=self._do_report)
            self._write.props('outline data-mark="write report"')
            self._report = ui.link(texts("report"), f"/files/report/{self._name}", new_tab=True)

    def _panels(self) -> None:
        texts = self._texts
        with ui.tab_panel("curves"):
            self._nothing = ui.label(texts("no metrics")).classes("card")
            with ui.element("div").classes("charts"):
                self._charts = [Chart(texts(key), metrics, key == "chart loss") for key, metrics in _FIRST.items()]
                self._charts[0].box.props('data-mark="chart loss"')
                self._other = Chart(texts("chart other"), [])
                with self._other.box:
                    self._select = ui.select([], on_change=self._choose_metric).props("dense outlined options-dense")
                    self._select.move(target_index=1)
        with ui.tab_panel("samples"):
            self._samples = ui.element("div")
        with ui.tab_panel("console"), ui.element("div").classes("command log tail"):
            self._log = ui.label().props('data-mark="console"')
        with ui.tab_panel("chat"):
            self._chat = ChatPanel(self._board, texts, self._folder)
        with ui.tab_panel("export"):
            self._export = ExportPanel(self._board, texts, self._folder)
        with ui.tab_panel("recipe"):
            self._config = ui.label().classes("command")
        self._sample_counts = (-1, -1)

    # --- what is shown -----------------------------------------------------------------------------

    async def update(self) -> None:
        """Show what the files of the run say now."""
        if not self._folder.root.is_dir():
            self._show_that_it_is_gone()
            return
        summary, curves, log = await asyncio.to_thread(self._read)
        self._show_state(summary, curves)
        self._show_curves(curves)
        self._log.text = log
        self._show_samples()
        self._export.update()

    def _read(self) -> tuple[Summary, dict[str, Points], str]:
        runs = self._board.runs
        summary = runs.summary(self._name, self._folder)
        self._environment = runs.environment(self._folder)
        log = log_tail(log_of(self._folder)) or self._texts("no log")
        return summary, runs.curves(self._folder), log

    def _show_state(self, one: Summary, curves: dict[str, Points]) -> None:
        texts, last = self._texts, {name: points[-1][1] for name, points in curves.items() if points}
        self._state.text = texts(one.state)
        self._state.classes(replace=f"state {one.state}")
        self._failure.text = one.failure
        self._failure.set_visibility(bool(one.failure))
        self._stop.set_visibility(one.is_active and self._board.can_stop(self._folder))
        self._resume.set_visibility(one.state in ("stopped", "failed"))
        report = self._folder.root / "report.html"
        self._report.set_visibility(report.is_file())
        self._write.set_visibility(self._folder.config.is_file())
        step = texts("of", f"{one.step:,}", f"{one.steps:,}") if one.steps else f"{one.step:,}"
        self._figures["step"](step)
        self._figures["loss"](number(one.loss))
        self._figures["val loss"](number(one.val_loss))
        self._figures["speed"](number(last.get("throughput/tokens_per_second")))
        self._figures["memory"](_memory(self._environment, last))
        seconds = _seconds(self._environment, one)
        self._figures["time"]("" if seconds is None else as_time(seconds))
        self._place.text = (
            f"{texts('folder')}: {shown(self._folder.root)}, {texts('changed')}: {ago(texts, one.changed)}"
        )
        if self._folder.config.is_file() and not self._config.text:
            self._config.text = self._folder.config.read_text(encoding="utf-8", errors="replace")

    def _show_that_it_is_gone(self) -> None:
        self._state.text = ""
        self._failure.text = self._texts("gone", self._folder.root)
        self._failure.set_visibility(True)
        for one in (self._stop, self._resume, self._write, self._report):
            one.set_visibility(False)

    def _show_curves(self, curves: dict[str, Points]) -> None:
        self._nothing.set_visibility(not curves)
        for chart in (*self._charts, self._other):
            chart.update(curves)
        used = {name for metrics in _FIRST.values() for name in metrics}
        others = sorted((name for name in curves if name not in used), key=lambda name: (name.startswith(_LATER), name))
        if others and others != self._select.options:
            self._select.set_options(others, value=self._select.value or others[0])
        self._other.box.set_visibility(bool(others))

    def _choose_metric(self) -> None:
        self._other.metrics = [str(self._select.value)]
        self._other.update(self._board.runs.curves(self._folder))

    def _show_samples(self) -> None:
        try:
            samples = read_lines(self._folder.root / "samples.jsonl")
            judged = read_lines(self._folder.root / VALIDATION_ANSWERS)
        except (OSError, ValueError):  # a line that is being written
            return
        if (len(samples), len(judged)) == self._sample_counts:
            return
        self._sample_counts = len(samples), len(judged)
        last = [line for line in judged if line.get("step") == judged[-1].get("step")]
        self._samples.clear()
        with self._samples:
            if not samples and not judged:
                ui.label(self._texts("no samples")).classes("card")
            for line in samples[: -SHOWN_SAMPLES - 1 : -1]:
                self._sample(str(line.get("prompt", "")), line)
            for line in last[:SHOWN_SAMPLES]:
                self._sample(str(line.get("question", "")), line)

    def _sample(self, question: str, line: Mapping[str, Any]) -> None:
        ui.label(question).classes("question text")
        with ui.element("div").classes("card"):
            ui.label(f"{self._texts('step')} {line.get('step', '')}").classes("quiet")
            answer = ui.label(str(line.get("answer", ""))).classes("text")
            if "expected" in line:  # of an evaluation: the report has all of them
                answer.classes("good" if line.get("is_right") else "bad")
                if not line.get("is_right"):
                    ui.label(self._texts("expected", line["expected"])).classes("quiet text")

    # --- what is done ------------------------------------------------------------------------------

    def _ask_to_stop(self) -> None:
        def stop() -> None:
            dialog.close()
            with shown_errors():
                self._board.stop(self._folder)
                ui.notify(self._texts("stopping"))

        with ui.dialog() as dialog, ui.card():
            ui.label(self._texts("stop now"))
            with ui.element("div").classes("bar"):
                ui.button(self._texts("stop"), color="negative", on_click=stop).props("unelevated").props(
                    'data-mark="stop now"'
                )
                ui.button(self._texts("cancel"), on_click=dialog.close).props("flat")
        dialog.open()

    def _do_resume(self) -> None:
        with shown_errors():
            self._board.resume(self._folder)
            ui.notify(self._texts("resumed"))

    def _do_report(self) -> None:
        with shown_errors():
            self._board.write_report(self._folder)


def _memory(environment: Mapping[str, Any], last: Mapping[str, float]) -> str:
    """Peak memory: of the device, or else of the process; empty where neither is known yet."""
    logged = [last[name] for name in ("memory/peak_allocated_mib", "memory/host_peak_rss_mib") if name in last]
    known = environment.get("peak_device_bytes") or environment.get("peak_process_bytes")
    size = logged[0] * MIB if logged else known
    return "" if size is None else as_size(size)


def _seconds(environment: Mapping[str, Any], one: Summary) -> float | None:
    """Time of the run's last process; of one that trains, up to now."""
    if not one.is_active:
        times = environment.get("seconds")
        return sum(times.values()) if times else None
    if (started := environment.get("started")) is None:
        return None
    return max(0.0, time.time() - datetime.fromisoformat(started).timestamp())
