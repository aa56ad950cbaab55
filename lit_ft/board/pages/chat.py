"""Panel of a run's page that talks to its model: base and adapter beside each other."""

import asyncio
import time

from nicegui import ui

from lit_ft.board.board import Board
from lit_ft.board.chat_client import ChatClient, all_ended
from lit_ft.board.pages.frame import shown_errors
from lit_ft.board.texts import Texts
from lit_ft.errors import RecipeError
from lit_ft.run.folder import RunFolder

POLL_SECONDS = 0.5
SAMPLING = {"temperature": float, "top_p": float, "max_tokens": int, "seed": int}
"""Fields of a request that set how answers are drawn; an empty one is the model's own default."""


class ChatPanel:
    """Conversation with all models of the run's server, each with its own earlier answers."""

    def __init__(self, board: Board, texts: Texts, folder: RunFolder) -> None:
        """Draw the panel; a server that runs already is used."""
        self._board, self._texts, self._folder = board, texts, folder
        self._client: ChatClient | None = None
        self._histories: dict[str, list[dict[str, str]]] = {}
        self._answering: asyncio.Task[None] | None = None
        ui.label(texts("chat note")).classes("quiet")
        with ui.element("div").classes("bar").style("margin: .75rem 0"):
            self._open = ui.button(texts("open chat"), icon="forum", on_click=self._do_open).props("unelevated")
            self._open.props('data-mark="open chat"')
            self._close = ui.button(texts("close chat"), icon="close", on_click=self._do_close).props("flat")
            self._clear = ui.button(texts("clear"), icon="refresh", on_click=self._do_clear).props("flat")
            self._note = ui.label().classes("quiet")
        with ui.element("div") as self._box:
            self._sampling_fields()
            self._turns = ui.element("div")
            with ui.element("div").classes("bar").style("flex-wrap: nowrap"):
                self._message = ui.textarea(label=texts("message")).props("outlined autogrow rows=1").style("flex: 1")
                self._message.props('data-mark="message"').on("keydown.enter.exact.prevent", self._do_send)
                self._send = ui.button(icon="send", on_click=self._do_send).props("round unelevated")
                self._send.props(f'aria-label="{texts("send")}"').props('data-mark="send"')
                self._stop = ui.button(icon="stop", color="negative", on_click=self._do_stop).props("round unelevated")
                self._stop.props(f'aria-label="{texts("stop answer")}"')
        self._show(False)
        if board.is_chat_open(folder):
            ui.timer(0, self._do_open, once=True)
        ui.context.client.on_delete(self._forget)

    def _sampling_fields(self) -> None:
        with ui.expansion(self._texts("sampling")).classes("w-full"), ui.element("div").classes("form"):
            self._system = ui.textarea(label=self._texts("system")).props("outlined autogrow rows=1")
            self._fields = {
                name: ui.input(label=self._texts(name), placeholder=self._texts("default")).props("outlined")
                for name in SAMPLING
            }
        self._fields["max_tokens"].value = "256"

    def _show(self, is_open: bool) -> None:
        self._open.set_visibility(not is_open)
        for one in (self._close, self._clear, self._box):
            one.set_visibility(is_open)
        self._show_answering(False)

    def _show_answering(self, is_answering: bool) -> None:
        self._send.set_visibility(not is_answering)
        self._stop.set_visibility(is_answering)

    # --- the server --------------------------------------------------------------------------------

    async def _do_open(self) -> None:
        with shown_errors():
            if not self._folder.has_checkpoint:
                raise RecipeError(self._texts("no checkpoint"))
            self._open.disable()
            try:
                self._board.open_chat(self._folder)
                await self._connect()
            finally:
                self._open.enable()
                self._note.text = ""

    async def _connect(self) -> None:
        began = time.monotonic()
        while (address := self._board.chat_address(self._folder)) is None:
            self._note.text = f"{self._texts('loading model')} {time.monotonic() - began:.0f} s"
            await asyncio.sleep(POLL_SECONDS)
        self._client = ChatClient(*address)
        self._histories = {name: [] for name in await self._client.models()}
        self._show(True)

    async def _do_close(self) -> None:
        await self._do_stop()
        self._board.close_chat(self._folder)
        await self._forget()
        self._turns.clear()
        self._show(False)

    async def _forget(self) -> None:
        if self._client is not None:
            await self._client.close()
        self._client = None

    async def _do_clear(self) -> None:
        await self._do_stop()
        self._turns.clear()
        self._histories = {name: [] for name in self._histories}

    # --- a turn ------------------------------------------------------------------------------------

    async def _do_send(self) -> None:
        question = str(self._message.value or "").strip()
        if not question or self._answering is not None or self._client is None:
            return
        with shown_errors():
            sampling = self._sampling()
            self._message.value = ""
            self._show_answering(True)
            self._answering = asyncio.create_task(self._ask(question, sampling))
            try:
                await self._answering
            except asyncio.CancelledError:
                pass  # by the button that stops answers
            finally:
                self._answering = None
                self._show_answering(False)

    async def _do_stop(self) -> None:
        if self._answering is not None:
            self._answering.cancel()

    def _sampling(self) -> dict[str, object]:
        sampling: dict[str, object] = {}
        for name, kind in SAMPLING.items():
            text = str(self._fields[name].value or "").strip()
            try:
                sampling |= {name: kind(text)} if text else {}
            except ValueError as error:
                raise RecipeError(self._texts("bad number", self._texts(name), text)) from error
        return sampling

    async def _ask(self, question: str, sampling: dict[str, object]) -> None:
        labels: dict[str, tuple[ui.label, ui.label]] = {}
        with self._turns:
            ui.label(question).classes("question text")
            with ui.element("div").classes("answers"):
                for name in self._histories:
                    with ui.element("div").classes("card"):
                        ui.label(name).classes("caption")
                        labels[name] = (
                            ui.label("...").classes("text answer"),
                            ui.label().classes("quiet"),
                        )
        # Both at once: the server batches what has one base.
        await all_ended(*(self._stream(name, question, sampling, *labels[name]) for name in self._histories))

    async def _stream(
        self, name: str, question: str, sampling: dict[str, object], label: ui.label, note: ui.label
    ) -> None:
        assert self._client is not None
        history, began, text = self._histories[name], time.monotonic(), ""
        history.append({"role": "user", "content": question})
        system = str(self._system.value or "").strip()
        messages = [{"role": "system", "content": system}] * bool(system) + history
        try:
            async for piece in self._client.answer(name, messages, sampling):
                text += piece.text
                label.text = text
                if piece.ended == "length":
                    note.text = f"{self._texts('truncated')}, "
            note.text += f"{time.monotonic() - began:.1f} s"
        finally:
            label.text = text
            history.append({"role": "assistant", "content": text})
