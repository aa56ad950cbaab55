"""Page of a new run: form, YAML and command of one recipe, its check, and its start."""

import asyncio
import html
import shlex
from pathlib import Path

from fastapi import Request
from nicegui import ui

from lit_ft.board.board import NAME, Board, shown
from lit_ft.board.command_line import differences, fit_arguments
from lit_ft.board.pages.form import Form
from lit_ft.board.pages.frame import POLL_SECONDS, address_of, frame, shown_errors, tag, texts_of
from lit_ft.board.processes import log_tail
from lit_ft.board.recipe_text import RecipeText
from lit_ft.board.texts import Texts
from lit_ft.errors import RecipeError

FIRST_RECIPE = "quickstart.yaml"
_EMPTY = ""


def register(board: Board) -> None:
    """Add the page."""

    @ui.page("/new")
    async def page(request: Request, recipe: str = FIRST_RECIPE) -> None:
        texts = texts_of(request)
        with frame(texts, texts("recipe"), texts("new run")):
            waiting = ui.label(texts("loading")).classes("quiet")
            await ui.context.client.connected()
            await asyncio.to_thread(lambda: board.schema.own)
            waiting.delete()
            _NewRun(board, texts, recipe)


class _NewRun:
    """Form and text of one recipe: what changes one changes the other, and the command."""

    def __init__(self, board: Board, texts: Texts, chosen: str) -> None:
        self._board, self._texts = board, texts
        self._files, self._fragments = board.recipes(), board.fragments()
        self._recipe, self._base = RecipeText(), RecipeText()
        self._file: Path | None = None
        with ui.element("div").classes("bar").style("margin: 1rem 0"):
            options = {_EMPTY: texts("empty"), **{name: name.removesuffix(".yaml") for name in self._files}}
            chosen = chosen if chosen in self._files else next(iter(self._files), _EMPTY)
            self._select = ui.select(options, value=chosen, label=texts("choose recipe"), with_input=True)
            self._select.props('outlined data-mark="recipe"').style("flex: 1 1 14rem").on_value_change(self._load)
            fragments = {name: name.removesuffix(".yaml") for name in self._fragments}
            self._on_top = ui.select(fragments, value=[], label=texts("fragments"), multiple=True, with_input=True)
            self._on_top.props('outlined use-chips data-mark="fragments"').style("flex: 1 1 14rem")
            self._on_top.on_value_change(self._put_on_top)
            self._name = ui.input(label=texts("name")).props('outlined data-mark="name"').style("flex: 1 1 10rem")
        with ui.element("div").classes("halves sticky"):
            self._form = Form(board.schema, texts, self._show_text)
            with ui.element("div"):
                self._draw_text()
        self._check_box = ui.element("div")
        self._load()

    def _draw_text(self) -> None:
        texts = self._texts
        with ui.element("div").classes("bar"):
            self._start_button = ui.button(texts("start"), icon="play_arrow", on_click=self._start)
            self._start_button.props('unelevated data-mark="start"')
            self._check_button = ui.button(texts("check"), icon="rule", on_click=self._check)
            self._check_button.props('outline data-mark="check"')
            ui.button(texts("copy"), icon="content_copy", on_click=self._copy).props("flat")
        self._error = ui.label().classes("bad")
        tag("h2", texts("command"))
        self._command = ui.label().classes("command").props('data-mark="command"')
        self._saved = ui.label(texts("saved recipe")).classes("quiet")
        tag("h2", texts("yaml"))
        self._area = (
            ui.textarea().props("outlined autogrow spellcheck=false").classes("w-full mono").props('data-mark="yaml"')
        )
        self._area.props("debounce=400").on_value_change(self._text_changed)

    # --- the recipe --------------------------------------------------------------------------------

    def _load(self) -> None:
        name = str(self._select.value or _EMPTY)
        with shown_errors():
            self._file = self._files.get(name)
            self._base = self._of_files()
            self._recipe = RecipeText(self._base.text)
            self._name.value = self._file.stem if self._file is not None else "run"
            self._show_text()
            self._form.show(self._recipe)

    def _put_on_top(self) -> None:
        """Replace earlier fragments by the chosen ones; other changes of the recipe stay."""
        with shown_errors():
            base = self._of_files()
            recipe = RecipeText(base.text)
            for name, value in differences(self._recipe, self._base):
                recipe.set(name, value)
            self._base, self._recipe = base, RecipeText(recipe.text)
            self._show_text()
            self._form.show(self._recipe)

    def _chosen_files(self) -> list[Path]:
        """Files that the recipe begins with, in order."""
        return [file for file in (self._file, *map(self._fragments.get, self._on_top.value)) if file is not None]

    def _of_files(self) -> RecipeText:
        recipe = RecipeText() if self._file is None else RecipeText.of_file(self._file)
        for name in self._on_top.value:
            recipe = recipe.with_fragment(RecipeText.of_file(self._fragments[name]), self._board.schema.kept)
        return recipe

    def _show_text(self) -> None:
        self._area.set_value(self._recipe.text)
        self._show_command()

    def _text_changed(self) -> None:
        text = str(self._area.value or "")
        if text == self._recipe.text:
            return
        try:
            self._recipe = RecipeText(text)
        except RecipeError as error:
            self._error.text = str(error)
            return
        self._form.show(self._recipe)
        self._show_command()

    def _arguments(self) -> list[str] | None:
        return fit_arguments(self._recipe, self._base, [shown(file) for file in self._chosen_files()])

    def _show_command(self) -> None:
        self._error.text = ""
        arguments = self._arguments()
        self._saved.set_visibility(arguments is None)
        arguments = ["--config", f"{self._name.value}.yaml"] if arguments is None else arguments
        self._command.text = shlex.join(["python", "-m", "lit_ft", "fit", *arguments])

    def _copy(self) -> None:
        ui.clipboard.write(self._command.text)
        ui.notify(self._texts("copied"))

    # --- what is done with it ------------------------------------------------------------------------

    def _start(self) -> None:
        with shown_errors():
            self._refuse_broken()
            name = str(self._name.value or "").strip()
            if NAME.fullmatch(name) is None:
                raise RecipeError(self._texts("bad name", name))
            run = self._board.start_run(name, self._arguments(), self._recipe.text)
            self._start_button.disable()  # the second click of a double click would start another run
            ui.navigate.to(address_of(run))

    def _refuse_broken(self) -> None:
        if self._error.text:
            raise RecipeError(self._error.text)

    async def _check(self) -> None:
        with shown_errors():
            self._refuse_broken()
            name = self._board.check(self._arguments(), self._recipe.text)
            self._check_button.disable()
            self._check_box.clear()
            with self._check_box:
                tag("h2", self._texts("checked")).props('data-mark="check heading"')
                note = ui.label(self._texts("checking")).classes("quiet")
            ui.run_javascript(f"getHtmlElement({self._check_box.id}).scrollIntoView()")
            with self._check_box:
                timer = ui.timer(POLL_SECONDS, lambda: self._look(name, note, timer))

    def _look(self, name: str, note: ui.label, timer: ui.timer) -> None:
        folder = self._board.check_folder(name)
        if self._board.processes.running(folder, "check") is not None:
            return
        timer.cancel()
        note.delete()
        self._check_button.enable()
        with self._check_box:
            if (folder / "check.html").is_file():
                address = html.escape(f"/files/check/{name}")
                ui.element("iframe").classes("page").props(f'src="{address}" title="{self._texts("checked")}"')
            else:
                ui.label(log_tail(folder / "check.log")).classes("command bad")
