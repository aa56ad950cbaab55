"""What all pages share: head, style, language, errors as messages."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from fastapi import Request
from lit_callbacks.output.quantities import as_number
from nicegui import ui

from lit_ft.board.texts import COOKIE, LANGUAGES, Texts, language_of
from lit_ft.errors import RecipeError

STYLE = (Path(__file__).parent / "board.css").read_text(encoding="utf-8")
POLL_SECONDS = 1.0
"""Time between two looks at the files of a run."""


def texts_of(request: Request) -> Texts:
    """Texts in the language of a request."""
    return Texts(language_of(request.cookies, request.headers.get("accept-language", "")))


@contextmanager
def frame(texts: Texts, kind: str, title: str) -> Iterator[None]:
    """Context of a page's content, below head and title."""
    ui.add_css(STYLE)
    ui.colors(primary="#2a6fc0", negative="#b3261e", dark_page="#12161d", dark="#1b212b")
    ui.page_title(f"{title} - lit_ft")
    with ui.element("div").classes("bar top"):
        with ui.element("div").classes("bar"):
            ui.link("lit_ft", "/").classes("brand")
            ui.link(texts("runs"), "/")
            ui.link(texts("new run"), "/new").props('data-mark="new run"')
        other = next(one for one in LANGUAGES if one != texts.language)
        ui.button(texts("language"), on_click=lambda: _choose(other)).props("flat dense no-caps").props(
            'data-mark="language"'
        )
    tag("p", kind).classes("kind")
    tag("h1", title)
    yield


def _choose(language: str) -> None:
    ui.run_javascript(f"document.cookie = '{COOKIE}={language}; path=/; max-age=31536000; samesite=strict'")
    ui.run_javascript("location.reload()")


def tag(name: str, text: str) -> ui.label:
    """Text in an HTML element of another name than ``div``."""
    label = ui.label(text)
    label.tag = name
    return label


def address_of(run: str) -> str:
    """Address of the page of a run."""
    return f"/run/{quote(run)}"


@contextmanager
def shown_errors() -> Iterator[None]:
    """Context in which an error that the user can correct becomes a message on the page."""
    try:
        yield
    except RecipeError as error:
        close = {"label": "OK", "color": "white"}  # a `close_button` has the color of links: blue on red
        ui.notify(str(error), type="negative", multi_line=True, timeout=0, actions=[close])


def figure(parent: ui.element, label: str) -> Callable[[str], None]:
    """A figure with its label; returns the function that sets its value."""
    with parent, ui.element("div") as box:
        ui.label(label).classes("quiet")
        value = ui.label("").classes("value")

    def update(text: str) -> None:
        value.text = text
        box.set_visibility(bool(text))

    update("")
    return update


def ago(texts: Texts, moment: float) -> str:
    """Time since a moment, in words."""
    seconds = max(0, int(time.time() - moment))
    for limit, unit, name in ((60, 1, "seconds"), (3600, 60, "minutes"), (172_800, 3600, "hours")):
        if seconds < limit:
            return texts(f"{name} ago", seconds // unit)
    return texts("days ago", seconds // 86_400)


def number(value: float | None) -> str:
    """Number with four digits; empty for None."""
    return "" if value is None else as_number(value)
