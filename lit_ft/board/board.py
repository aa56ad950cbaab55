"""The board: folders of runs, and what it starts for them."""

import os
import re
import secrets
import shlex
import shutil
import signal
import threading
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

from jsonargparse import ArgumentParser

from lit_ft.board.processes import Processes, Record, log_tail
from lit_ft.board.runs import BOARD, Runs, process_of_lock
from lit_ft.board.schema import Schema
from lit_ft.errors import RecipeError
from lit_ft.recipe.allowed_code import as_options, separated
from lit_ft.run.folder import LAST, RunFolder, new_run

NAME = re.compile(r"[^\W_][\w.-]{0,63}")
"""Names that a run may be given: no path."""
SERVE_KEY = "serve.key"
"""File with the key of a run's server, which the user alone can read."""
_CHECKS = ".checks"
_KEPT_CHECKS = 20
_SECTION = re.compile(r"^(model|data|trainer|optimizer|lr_scheduler)\b", re.MULTILINE)
_NAMES_MODEL = re.compile(r"^[^#\n]*\bpretrained:", re.MULTILINE)


class Board:
    """Runs below some folders, and processes of ``python -m lit_ft`` on them."""

    def __init__(
        self,
        roots: Sequence[Path],
        recipes: Path,
        make_parser: Callable[[], ArgumentParser],
        processes: Processes | None = None,
    ) -> None:
        """Set the folders.

        Args:
            roots: folders of runs; new ones are written to the first.
            recipes: folder of recipes that new runs begin with.
            make_parser: builds the parser of ``fit``; called when a form is first shown.
            processes: starts processes.
        """
        self.processes = processes or Processes()
        self.runs = Runs(roots, self.processes)
        self.recipes_folder = recipes
        self._make_parser = make_parser
        self._schema: Schema | None = None
        self._schema_lock = threading.Lock()
        self._checks: dict[str, Path] = {}
        self._chats: dict[Path, Record] = {}

    @property
    def schema(self) -> Schema:
        """Options of ``fit``; the first access imports what a training imports, which takes seconds."""
        with self._schema_lock:
            if self._schema is None:
                self._schema = Schema(self._make_parser())
            return self._schema

    def prepare_schema(self) -> None:
        """Import that beforehand, in a thread."""
        if self._schema is None and not self._schema_lock.locked():
            threading.Thread(target=lambda: self.schema, daemon=True).start()

    def recipes(self) -> dict[str, Path]:
        """Recipes by their path below the folder of recipes, and no other YAML files."""
        recipes = [file for file in self.recipes_folder.rglob("*.yaml") if _SECTION.search(_text_of(file))]
        files = sorted(recipes, key=lambda file: (len(file.parts), file))
        return {file.relative_to(self.recipes_folder).as_posix(): file for file in files}

    def fragments(self) -> dict[str, Path]:
        """Recipes that name no model, to be put on top of one that does."""
        return {name: file for name, file in self.recipes().items() if not _NAMES_MODEL.search(_text_of(file))}

    # --- training ----------------------------------------------------------------------------------

    def start_run(self, name: str, arguments: Sequence[str] | None, recipe: str) -> str:
        """Start ``fit`` in a new run folder; returns the name of the run.

        Args:
            name: name of the recipe, the folder above that of the run.
            arguments: options of ``fit`` that stand for the recipe; None where it takes a file to say it.
            recipe: text of the recipe, which is kept beside the log.

        Raises:
            RecipeError: the name is none, or the folder cannot be written.
        """
        if NAME.fullmatch(name) is None:
            raise RecipeError(
                f"name={name!r} must begin with a letter or digit; then also dots, dashes and underscores"
            )
        root = self.runs.roots[0]
        run = new_run(name, create=True, runs=root)
        own = run.root / BOARD
        own.mkdir()
        given = _saved(own, name, arguments, recipe)
        self.processes.start(own, "fit", ["fit", *given, "--run_dir", shown(run.root), *_allowed()])
        return f"0/{run.root.relative_to(root).as_posix()}"

    def resume(self, run: RunFolder) -> Record:
        """Continue a run from its newest checkpoint, or start it again where it saved nothing."""
        return self.processes.start(run.root / BOARD, "fit", self.resume_arguments(run))

    def resume_arguments(self, run: RunFolder) -> list[str]:
        """Arguments that continue a run where its folder is now, with the code that the user allows the board.

        A folder that was copied or downloaded has a log and a record that name another folder, or allow other code.
        """
        if run.has_checkpoint:
            return ["fit", "--config", shown(run.config), "--ckpt_path", LAST, *_allowed()]
        given = ["--config", shown(run.config)]
        if (record := self.processes.find(run.root / BOARD, "fit")) is not None:  # the command that has started it
            given, _ = separated(record.arguments[1:])
            given = given[: given.index("--run_dir")] if "--run_dir" in given else given
        return ["fit", *given, "--run_dir", shown(run.root), *_allowed()]

    def can_stop(self, run: RunFolder) -> bool:
        """Whether the run's process is known on this machine."""
        return self.processes.running(run.root / BOARD, "fit") is not None or process_of_lock(run) is not None

    def stop(self, run: RunFolder) -> None:
        """Send SIGINT to a run: it saves a checkpoint and ends.

        Raises:
            RecipeError: its process is not on this machine, or is another user's.
        """
        if (record := self.processes.running(run.root / BOARD, "fit")) is not None:
            self.processes.stop(record)
            return
        pid = process_of_lock(run)
        try:
            if pid is None:
                raise ProcessLookupError
            os.kill(pid, signal.SIGINT)  # of another session: its other ranks stop together with rank 0
        except OSError as error:
            raise RecipeError(
                f"the process of {run.root} cannot be signaled from here; stop it where it runs"
            ) from error

    # --- check, export, report ---------------------------------------------------------------------

    def check(self, arguments: Sequence[str] | None, recipe: str) -> str:
        """Start ``check`` of a recipe, as ``start_run``; returns the name under which its log and page are found.

        Raises:
            RecipeError: the folder cannot be written.
        """
        above = self.runs.roots[0] / _CHECKS
        name = f"{datetime.now():%Y-%m-%d_%H-%M-%S}-{secrets.token_hex(4)}"
        self._checks[name] = folder = above / name
        RunFolder(folder).create()
        given = _saved(folder, "recipe", arguments, recipe)
        self.processes.start(folder, "check", ["check", *given, "--html", str(folder / "check.html"), *_allowed()])
        for old in sorted(one for one in above.iterdir() if one.name not in self._checks)[:-_KEPT_CHECKS]:
            shutil.rmtree(old, ignore_errors=True)
        return name

    def check_folder(self, name: str) -> Path:
        """Folder of a check.

        Raises:
            RecipeError: this board has started none of this name.
        """
        if name not in self._checks:
            raise RecipeError(f"there is no check {name!r}; start one on the page of a new run")
        return self._checks[name]

    def export(self, run: RunFolder, options: Sequence[str]) -> Record:
        """Start ``export`` of a run."""
        return self.processes.start(run.root / BOARD, "export", ["export", shown(run.root), *options, *_allowed()])

    def write_report(self, run: RunFolder) -> Record:
        """Start ``report`` of a run."""
        return self.processes.start(run.root / BOARD, "report", ["report", shown(run.root)])

    # --- chat --------------------------------------------------------------------------------------

    def open_chat(self, run: RunFolder) -> Record:
        """Start ``serve`` of a run, or find the one that runs; of full fine-tuning beside its base, a second model."""
        folder = run.root / BOARD
        record = self.processes.running(folder, "serve")
        if record is None:
            model = run.recipe()["model"].get("init_args", {})
            base = [model["pretrained"]] if model.get("peft") is None and "pretrained" in model else []
            key = _write_key(folder / SERVE_KEY)
            (folder / "serve.log").unlink(missing_ok=True)
            arguments = ["serve", *base, shown(run.root), "--port", "0", "--api_key_file", shown(key), *_allowed()]
            record = self.processes.start(folder, "serve", arguments)
        self._chats[folder] = record
        return record

    def chat_address(self, run: RunFolder) -> tuple[str, str] | None:
        """Address and key of a run's server; None while it loads.

        Raises:
            RecipeError: it has ended.
        """
        folder = run.root / BOARD
        is_open = self.is_chat_open(run)
        log = log_tail(folder / "serve.log")
        if not is_open:
            lines = [line for line in log.splitlines() if line.strip()]
            raise RecipeError(lines[-1] if lines else "the server has ended")
        addresses = re.findall(r"^listening on (http://\S+)/v1", log, re.MULTILINE)
        return (addresses[-1], _read_key(folder / SERVE_KEY)) if addresses else None

    def is_chat_open(self, run: RunFolder) -> bool:
        """Whether a server of the run is there."""
        return self.processes.running(run.root / BOARD, "serve") is not None

    def close_chat(self, run: RunFolder) -> None:
        """Stop the server of a run."""
        self._chats.pop(run.root / BOARD, None)
        record = self.processes.find(run.root / BOARD, "serve")
        if record is not None:
            self.processes.stop(record)

    def close(self) -> None:
        """Stop the servers that chats have opened; trainings, checks and exports go on."""
        for record in self._chats.values():
            self.processes.stop(record)
        deadline = time.monotonic() + 5
        while any(map(self.processes.is_alive, self._chats.values())) and time.monotonic() < deadline:
            time.sleep(0.1)


def shown(path: Path) -> str:
    """Path as a command shows it: relative to this folder where it lies below it."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def _text_of(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace")


def _saved(folder: Path, name: str, arguments: Sequence[str] | None, recipe: str) -> list[str]:
    """Write a recipe to a folder; returns the options that stand for it, which name the file if there are no others."""
    file = folder / f"{name}.yaml"
    file.write_text(recipe, encoding="utf-8")
    return ["--config", shown(file)] if arguments is None else list(arguments)


def _write_key(file: Path) -> Path:
    """Write a new key, not into a file or link that is there."""
    try:
        file.parent.mkdir(exist_ok=True)
        file.unlink(missing_ok=True)
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
            opened.write(secrets.token_urlsafe(16))
    except OSError as error:
        raise RecipeError(f"{file} cannot be written ({error.strerror}); choose another folder") from error
    return file


def _read_key(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise RecipeError(f"{file} cannot be read ({error.strerror}); unload the model, and load it again") from error


def _allowed() -> list[str]:
    return shlex.split(as_options())
