"""The ``parity`` command: compare what a server makes of a run's data with what was trained."""

from collections.abc import Sequence
from pathlib import Path

from lit_callbacks.output.printable import printable
from rich.console import Console
from rich.table import Table

from lit_ft.errors import RecipeError
from lit_ft.inference.openai.client import OpenAIClient
from lit_ft.inference.opening import open_model
from lit_ft.inference.server_parity import Parity, TurnParity, answered_turns, compare
from lit_ft.recipe.parser import RecipeParser
from lit_ft.run.folder import LAST, RunFolder
from lit_ft.training.console import show_progress_on_terminals_only

FAULTS_SHOWN = 10
"""Differences that are printed in full; the table has them all."""


def run(arguments: list[str]) -> None:
    """Compare a run with the server that serves it, on rows of the run's data; exit code 1 if they differ."""
    show_progress_on_terminals_only()
    parser = RecipeParser(prog="python -m lit_ft parity", description=(run.__doc__ or ""))
    parser.add_argument("path", help="a run's folder")
    parser.add_argument("--url", required=True, help="address of the server, e.g. http://127.0.0.1:8000")
    parser.add_argument(
        "--model", type=str | None, default=None, help="its name there; by default the only one, or the run's folder"
    )
    parser.add_argument("--api_key", type=str | None, default=None, help="key that the server asks for")
    parser.add_argument("--ckpt_path", default=LAST, help="checkpoint of the run: last, best or a path")
    parser.add_argument("--split", choices=("train", "val"), default="train", help="data that is compared")
    parser.add_argument("--rows", type=int, default=20, help="conversations, from the beginning of the data")
    parser.add_argument("--max_new_tokens", type=int, default=64, help="largest number of tokens of a greedy answer")
    parser.add_argument(
        "--bound",
        type=float | None,
        default=None,
        help="largest difference of a log-probability; by default 0.001 in float32, 0.05 in float16, 0.5 in bfloat16",
    )
    options = parser.parse_args(arguments[1:])
    for name, least in (("rows", 1), ("max_new_tokens", 1)):
        if options[name] < least:
            raise RecipeError(f"{name}={options[name]} must be {least} or more")
    if options.bound is not None and not 0 <= options.bound < float("inf"):
        raise RecipeError(f"bound={options.bound:g} must be 0 or more")
    folder = RunFolder(Path(options.path).expanduser())
    if not folder.config.is_file():
        raise RecipeError(f"{options.path!r} is no run: it has no config.yaml; name the folder that fit wrote")
    client = OpenAIClient(options.url, options.api_key)
    name = _chosen(options.model, client.models(), Path(options.path).resolve().name, client.url)
    opened = open_model(options.path, options.ckpt_path)
    turns = answered_turns(folder.recipe(), opened, options.split, options.rows)
    parity = compare(opened, turns, client, name, options.bound, options.max_new_tokens)
    faults = parity.faults(opened.tokenizer)
    _show(parity, f"{opened.name} and {name} at {client.url}", faults)
    if faults:
        raise SystemExit(1)


def _chosen(given: str | None, served: Sequence[str], folder: str, url: str) -> str:
    if given is None:
        given = served[0] if len(served) == 1 else folder
    if given not in served:
        raise RecipeError(f"{url} has no model {given!r}; give --model one of {', '.join(served)}")
    return given


def _show(parity: Parity, title: str, faults: Sequence[str]) -> None:
    console = Console(width=None if Console().is_terminal else 120, highlight=False)
    table = Table(title=printable(title), title_justify="left")
    for header in ("turn", "prompt", "log-probability: largest", "mean", "greedy answer"):
        table.add_column(header, overflow="fold")  # the end of a path has the row
    for turn in parity.turns:
        table.add_row(*_cells(turn))
    console.print(table, markup=False)
    for name, figure in parity.summary().items():
        console.print(f"{name}: {figure}", markup=False)
    for column, reason in parity.left_out.items():
        console.print(printable(f"left out: {column}, which the server does not give ({reason})"), markup=False)
    for fault in faults[:FAULTS_SHOWN]:
        console.print(printable(fault), markup=False, soft_wrap=True)
    if len(faults) > FAULTS_SHOWN:
        console.print(f"... and {len(faults) - FAULTS_SHOWN:,} more differences", markup=False)


def _cells(turn: TurnParity) -> list[str]:
    differences = turn.logprob_differences
    scores = ["-", "-"] if differences is None else [f"{differences.max():.2g}", f"{differences.mean():.2g}"]
    tie = " (near tie)" if turn.is_tie else ""
    return [
        printable(turn.turn.name),
        "-" if turn.served_prompt is None else _place(turn.prompt_place),
        *scores,
        "-" if turn.served_greedy is None else _place(turn.greedy_place) + tie,
    ]


def _place(at: int) -> str:
    return f"differs at token {at:,}" if at else "same"
