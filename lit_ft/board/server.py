"""The web application: NiceGUI's pages and a run's files behind the token."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import uvicorn
from fastapi import FastAPI
from fastapi.responses import FileResponse, PlainTextResponse, Response
from nicegui import ui

from lit_ft.board.access import TokenGate
from lit_ft.board.board import Board
from lit_ft.board.pages import new_run, run, start
from lit_ft.errors import RecipeError

ICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32"><rect width="32" height="32" rx="7" fill="#3d85d9"/>'
    '<path d="M6 8c3 12 8 15 20 16" fill="none" stroke="#fff" stroke-width="3.5" stroke-linecap="round"/></svg>'
)
RECONNECT_SECONDS = 60.0
"""Time that a page keeps what was typed while the server does not answer: imports may stall it on a busy machine."""
_PAGE_HEADERS = {
    # A page shows texts of data and models: it runs nothing, and no other site frames it.
    "Content-Security-Policy": "sandbox allow-popups; default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
    "frame-ancestors 'self'",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
}


def application(board: Board, token: str, port: int) -> FastAPI:
    """Application of a board; one per process, as NiceGUI's pages are.

    Args:
        board: the board.
        token: token that requests carry.
        port: port that it is served on.
    """

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(board.close)

    app = FastAPI(openapi_url=None, lifespan=lifespan)
    _add_files(app, board)
    for page in (start, new_run, run):
        page.register(board)
    ui.run_with(
        app,
        title="lit_ft",
        favicon=ICON,
        dark=None,
        tailwind=False,
        show_welcome_message=False,
        reconnect_timeout=RECONNECT_SECONDS,
    )
    app.add_middleware(TokenGate, token=token, port=port)
    return app


def _add_files(app: FastAPI, board: Board) -> None:
    """Routes of the two kinds of pages that commands write; names are looked up, never joined to a path."""

    @app.get("/files/report/{name:path}")
    def report(name: str) -> Response:
        return _page(lambda: board.runs.folder(name).root / "report.html")

    @app.get("/files/check/{name}")
    def check(name: str) -> Response:
        return _page(lambda: board.check_folder(name) / "check.html")


def _page(find: Callable[[], Path]) -> Response:
    try:
        path = find()
    except RecipeError as error:
        return PlainTextResponse(f"{error}\n", 404)
    if not path.is_file():
        return PlainTextResponse("not written yet\n", 404)
    return FileResponse(path, media_type="text/html; charset=utf-8", headers=_PAGE_HEADERS)


def serve(app: FastAPI, listener: socket.socket) -> None:
    """Answer requests until a signal stops the server."""
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=2)
    uvicorn.Server(config).run(sockets=[listener])
