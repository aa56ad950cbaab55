"""The ``board`` command: a page in the browser that starts runs and shows them."""

import argparse
import secrets
from collections.abc import Sequence
from pathlib import Path

from lit_ft.commands.inference.keys import given_key
from lit_ft.commands.inference.listening import LOOPBACK, address_of, listening
from lit_ft.errors import RecipeError, check_installed
from lit_ft.recipe.option_parser import OptionParser
from lit_ft.run.folder import RUNS

TOKEN_VARIABLE = "LIT_FT_BOARD_TOKEN"
"""Environment variable with the token."""
_DESCRIPTION = (
    "Start runs from a form and watch them in a browser, talk to them and export them. Trainings are processes of "
    "their own: they go on when the page or the board is closed."
)


def run(arguments: list[str]) -> None:
    """Parse the options and serve the board."""
    # Not with RecipeParser: it imports models, which takes seconds.
    parser = OptionParser(prog="python -m lit_ft board", description=_DESCRIPTION)
    parser.add_argument("runs", nargs="*", type=Path, default=[RUNS], metavar="RUNS", help=f"folders of runs ({RUNS})")
    parser.add_argument("--recipes", type=Path, help="folder of recipes (recipes, where it exists)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 is all of the machine's")
    parser.add_argument("--port", type=int, default=8080, help="0 takes a free one (8080)")
    parser.add_argument("--token_file", help=f"file with the token of the address; by default {TOKEN_VARIABLE}, or new")
    parser.add_argument("--token", help="the token itself, which other users of the machine see")
    options = parser.parse_args(arguments[1:])
    token = _token(given_key("token", options.token, options.token_file, TOKEN_VARIABLE))
    _check_folders(options.runs, options.recipes)
    check_installed("board needs", "board", "nicegui", "ruamel.yaml", "psutil")
    with listening(options.host, options.port) as listener:
        from lit_ft.board.board import Board
        from lit_ft.board.server import application, serve

        board = Board(options.runs, options.recipes or Path("recipes"), _fit_parser)
        app = application(board, token, listener.getsockname()[1])
        print(f"runs: {', '.join(map(str, options.runs))}")
        if options.host not in LOOPBACK:
            print(f"{options.host} can be reached from other machines: whoever has the token runs commands here")
        address = f"{address_of(options.host, listener)}/?token={token}"
        print(f"open {address} (Ctrl-C stops the board, not its runs)", flush=True)
        serve(app, listener)


def _token(given: str | None) -> str:
    token = secrets.token_urlsafe(16) if given is None else given
    if len(token) < 8 or not token.isascii() or not all(c.isalnum() or c in "-._~" for c in token):
        raise RecipeError(f"token={token!r} must have 8 letters, digits or -._~ at least; leave it out for a new one")
    return token


def _check_folders(runs: Sequence[Path], recipes: Path | None) -> None:
    for path in runs:
        if path.exists() and not path.is_dir():
            raise RecipeError(f"RUNS={str(path)!r} is no folder; name one, which is made where it is missing")
    if recipes is not None and not recipes.is_dir():
        raise RecipeError(f"recipes={str(recipes)!r} is no folder; name one with recipes, or leave it out")


def _fit_parser() -> "argparse.ArgumentParser":
    from lit_ft.commands.train import fit_parser  # seconds of imports, which the start page does not wait for

    return fit_parser()
