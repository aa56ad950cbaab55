"""The ``parity`` command: compare a server's tokens, log-probabilities and answers with those of its run."""

import shlex
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from jsonargparse import Namespace
from lit_callbacks.output.printable import printable
from lit_callbacks.report.tables import ReportTable
from rich.console import Console
from rich.table import Table

from lit_ft.commands.inference.keys import API_KEY, given_key
from lit_ft.errors import RecipeError
from lit_ft.inference.answered_turns import AnsweredTurns, answered_turns
from lit_ft.inference.openai.client import OpenAIClient
from lit_ft.inference.opening import open_model
from lit_ft.inference.server_parity import Parity, TurnParity, compare
from lit_ft.recipe.parser import RecipeParser
from lit_ft.run.folder import LAST, RunFolder
from lit_ft.scoring.results import add_to_report
from lit_ft.training.console import show_progress_on_terminals_only

FAULTS_SHOWN = 10
"""Differences that are printed in full; the table has them all."""


def run(arguments: list[str]) -> None:
    """Compare a run with the server that serves it, on rows of the run's data; exit code 1 if they differ."""
    show_progress_on_terminals_only()
    parser = RecipeParser(prog="python -m lit_ft parity", description=(run.__doc__ or ""))
    parser.add_argument("path", help="a run's folder")
    parser.add_argument("--url", required=True, help="address of the server, e.g. http://127.0.0.1:8000")
    parser.add_argument("--model", type=str | None, help="its name there; by default the only one, or the run's folder")
    parser.add_argument("--api_key_file", type=str | None, help=f"file with the key that it asks for; or {API_KEY}")
    parser.add_argument("--api_key", type=str | None, help="the key itself")
    parser.add_argument("--ckpt_path", default=LAST, help="checkpoint of the run: last, best or a path")
    parser.add_argument("--split", choices=("train", "val"), default="train", help="data that is compared")
    parser.add_argument("--rows", type=int, default=20, help="conversations, from the beginning of the data")
    parser.add_argument("--max_new_tokens", type=int, default=64, help="largest number of tokens of a greedy answer")
    parser.add_argument(
        "--bound",
        type=float | None,
        help="largest difference of a log-probability; by default 0.001 in float32, 0.05 in float16, 0.5 in bfloat16; "
        "for llama.cpp's server 0.05 in F32 and F16, 0.5 in BF16 and Q8_0",
    )
    options = parser.parse_args(arguments[1:])
    for key in ("rows", "max_new_tokens"):
        if options[key] < 1:
            raise RecipeError(f"{key}={options[key]} must be 1 or more")
    if options.bound is not None and not 0 <= options.bound < float("inf"):
        raise RecipeError(f"bound={options.bound:g} must be 0 or more")
    folder = RunFolder.at(options.path)
    if not folder.config.is_file():
        raise RecipeError(f"{options.path!r} is no run: it has no config.yaml; name the folder that fit wrote")
    client = OpenAIClient(options.url, given_key("api_key", options.api_key, options.api_key_file, API_KEY))
    name = client.chosen(options.model, Path(options.path).resolve().name)
    opened = open_model(options.path, options.ckpt_path)
    answered = answered_turns(folder.recipe(), opened, options.split, options.rows)
    parity = compare(opened, answered.turns, client, name, options.bound, options.max_new_tokens)
    faults, title = parity.faults(opened.tokenizer), f"{opened.name} and {name} at {client.url}"
    notes = [*_notes(parity, answered), *_shown(faults)]
    _show(parity, title, notes)
    add_to_report(folder.root, _table(parity, title, notes, _command(options, name), bool(faults)), "parity")
    if faults:
        raise SystemExit(1)


COLUMNS = ("turn", "prompt", "log-probability: largest", "mean", "greedy answer")
"""Headers of the table."""


def _show(parity: Parity, title: str, notes: Sequence[str]) -> None:
    console = Console(width=None if Console().is_terminal else 120, highlight=False)
    table = Table(title=printable(title), title_justify="left")
    for header in COLUMNS:
        table.add_column(header, overflow="fold")  # the end of a path has the row
    for turn in parity.turns:
        table.add_row(*_cells(turn))
    console.print(table, markup=False)
    for note in notes:
        console.print(printable(note), markup=False, soft_wrap=True)


def _notes(parity: Parity, answered: AnsweredTurns) -> list[str]:
    """Figures over all turns, what was passed over, and what the server lacks."""
    left_out = [
        f"left out: {column}, which the server does not give ({reason})" for column, reason in parity.left_out.items()
    ]
    return [f"{name}: {figure}" for name, figure in parity.summary().items()] + answered.passed_over() + left_out


def _shown(faults: Sequence[str]) -> list[str]:
    more = len(faults) - FAULTS_SHOWN
    return [*faults[:FAULTS_SHOWN], *([f"... and {more:,} more differences"] if more > 0 else [])]


def _table(parity: Parity, title: str, notes: Sequence[str], command: str, is_fault: bool) -> ReportTable:
    """The table for the run's report."""
    written = datetime.now().astimezone().isoformat(timespec="seconds")
    rows = [_cells(turn) for turn in parity.turns]
    return ReportTable(f"Parity: {title}", command, written, COLUMNS, rows, notes, is_fault)


def _command(options: Namespace, name: str) -> str:
    """Command line that makes this comparison again; without the key."""
    given = {"url": options.url, "model": name, "ckpt_path": options.ckpt_path, "split": options.split}
    given |= {"rows": options.rows, "max_new_tokens": options.max_new_tokens}
    given |= {} if options.bound is None else {"bound": options.bound}
    words = [options.path, *(word for key, value in given.items() for word in (f"--{key}", str(value)))]
    return f"python -m lit_ft parity {shlex.join(words)}"


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
