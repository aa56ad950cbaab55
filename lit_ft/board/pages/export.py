"""Panel of a run's page that exports it, in a process of its own."""

import re

from nicegui import ui

from lit_ft.board.board import Board
from lit_ft.board.pages.frame import shown_errors
from lit_ft.board.processes import log_tail
from lit_ft.board.runs import BOARD
from lit_ft.board.texts import Texts
from lit_ft.run.folder import BEST, LAST, RunFolder


class ExportPanel:
    """Options of ``export``, its log, and the command that the run itself names."""

    def __init__(self, board: Board, texts: Texts, folder: RunFolder) -> None:
        """Draw the panel."""
        self._board, self._texts, self._folder = board, texts, folder
        with ui.element("div").classes("form"):
            kinds = {"merged": texts("export merged"), "adapter": texts("export adapter")}
            self._kind = ui.select(kinds, value="merged").props("outlined")
            self._checkpoint = ui.select([LAST, BEST], value=LAST, label=texts("checkpoint")).props("outlined")
            dtypes = {"": texts("default"), "fp32": "fp32", "bf16": "bf16", "fp16": "fp16"}
            self._dtype = ui.select(dtypes, value="", label=texts("dtype")).props("outlined")
            bases = {"": texts("none"), "dequantize": "dequantize", "keep": "keep"}
            self._quantized = ui.select(bases, value="", label=texts("quantized base")).props("outlined")
        for one in (self._dtype, self._quantized):
            one.bind_visibility_from(self._kind, "value", value="merged")
        with ui.element("div").classes("bar").style("margin: 1rem 0"):
            self._button = ui.button(texts("export now"), icon="download", on_click=self._start).props("unelevated")
            self._button.props('data-mark="export now"')
            self._note = ui.label().classes("quiet")
        self._log = ui.label().classes("command log").props('data-mark="export log"')

    def _start(self) -> None:
        with shown_errors():
            self._board.export(self._folder, self._options())
        self.update()

    def _options(self) -> list[str]:
        options = ["--ckpt_path", str(self._checkpoint.value)]
        if self._kind.value == "merged":
            options.append("--merge")
            for name, value in (("--dtype", self._dtype.value), ("--quantized_base", self._quantized.value)):
                options += [name, value] if value else []
        return options

    def update(self) -> None:
        """Show the log as it is now."""
        own = self._folder.root / BOARD
        self._button.set_enabled(self._board.processes.running(own, "export") is None)
        text = log_tail(own / "export.log")
        named = re.findall(r"^next: (.+ export .+)$", log_tail(own / "fit.log"), re.MULTILINE)
        self._log.text = text or (f"$ {named[-1]}" if named else "")
        self._log.set_visibility(bool(self._log.text))
        record = self._board.processes.find(own, "export")
        code = None if record is None else record.exit_code
        self._note.text = "" if code is None else self._texts("ended", code)
