"""Start page: all runs."""

import asyncio

from fastapi import Request
from nicegui import ui

from lit_ft.board.board import Board, shown
from lit_ft.board.pages.frame import POLL_SECONDS, address_of, ago, frame, number, texts_of
from lit_ft.board.runs import Summary
from lit_ft.board.texts import Texts


def register(board: Board) -> None:
    """Add the page."""

    @ui.page("/")
    async def page(request: Request) -> None:
        texts = texts_of(request)
        board.prepare_schema()  # for the page of a new run, which is the next one
        with frame(texts, texts("board"), texts("runs")):
            ui.label(", ".join(shown(root) for root in board.runs.roots)).classes("quiet")
            with ui.element("div").classes("bar").style("margin: 1rem 0"):
                ui.button(texts("new run"), icon="add", on_click=lambda: ui.navigate.to("/new")).props("unelevated")
            rows = _Rows(board, texts)
            await rows.update()
            ui.timer(2 * POLL_SECONDS, rows.update)


class _Rows:
    """The list; a row that has changed is filled again, and stays the link that has the focus."""

    def __init__(self, board: Board, texts: Texts) -> None:
        self._board, self._texts = board, texts
        self._drawn: list[tuple[Summary, str]] | None = None
        self._links: dict[str, ui.link] = {}
        self._box = ui.element("div").classes("runs")

    async def update(self) -> None:
        summaries = await asyncio.to_thread(self._board.runs.summaries)
        now = [(one, ago(self._texts, one.changed)) for one in summaries]
        before, self._drawn = self._drawn, now
        if before is None or [one.name for one, _ in now] != list(self._links):
            self._draw(now)
            return
        for (summary, changed), earlier in zip(now, before, strict=True):
            if (summary, changed) != earlier:
                self._links[summary.name].clear()
                self._fill(summary, changed)

    def _draw(self, now: list[tuple[Summary, str]]) -> None:
        self._box.clear()
        self._links.clear()
        with self._box:
            if not now:
                folders = ", ".join(shown(root) for root in self._board.runs.roots)
                ui.label(self._texts("no runs", folders=folders)).classes("card")
                return
            self._head()
            for summary, changed in now:
                self._links[summary.name] = ui.link(target=address_of(summary.name)).classes("run")
                self._fill(summary, changed)

    def _head(self) -> None:
        with ui.element("div").classes("run head"):
            for name in ("run", "state", "step", "loss", "val loss", "changed"):
                ui.label(self._texts(name))

    def _fill(self, one: Summary, changed: str) -> None:
        texts = self._texts
        with self._links[one.name]:
            ui.label(one.title).classes("name")
            ui.label(texts(one.state)).classes(f"state {one.state}")
            step = texts("of", f"{one.step:,}", f"{one.steps:,}") if one.steps else f"{one.step:,}"
            cells = {"step": step, "loss": number(one.loss), "val loss": number(one.val_loss), "changed": changed}
            for name, value in cells.items():
                with ui.element("span").classes("cell"):
                    if value:
                        ui.label(texts(name)).classes("label")
                    ui.label(value).style("display: inline")
            if one.failure:
                ui.label(one.failure).classes("failure bad quiet")
