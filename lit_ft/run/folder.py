"""The folder of a run: its name, what lies where in it."""

import os
import re
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lit_ft.bounded_yaml import load_yaml
from lit_ft.checkpointing.selection import newest_good
from lit_ft.checkpointing.storage import replacement
from lit_ft.errors import RecipeError, explained
from lit_ft.run.lock import is_running, lock_run
from lit_ft.run.state import finished_step

RUNS = Path("checkpoints/runs")


@dataclass(frozen=True)
class RunFolder:
    """Everything of a run lies under ``root``."""

    root: Path

    @property
    def config(self) -> Path:
        """The resolved recipe; ``fit --config`` takes it."""
        return self.root / "config.yaml"

    @property
    def checkpoints(self) -> Path:
        """Lightning checkpoints: trainable weights, optimizer, loops."""
        return self.root / "checkpoints"

    @property
    def adapter(self) -> Path:
        """For ``peft.PeftModel.from_pretrained``."""
        return self.root / "adapter"

    @property
    def merged(self) -> Path:
        """For ``transformers.AutoModelForCausalLM.from_pretrained``."""
        return self.root / "merged"

    @property
    def finished(self) -> Path:
        """Says that the run came to its end, and at which step."""
        return self.root / "finished.json"

    @property
    def has_checkpoint(self) -> bool:
        """Whether there is anything that a run could resume from; nothing is read."""
        return any(self.checkpoints.glob("*.ckpt")) or bool(replacement.interrupted(self.checkpoints))

    @classmethod
    def of_config(cls, file: Path, run_dir: str | None) -> "RunFolder | None":
        """The run folder that a ``config.yaml`` lies in, where the file names another one: it was copied or moved.

        Args:
            file: the recipe.
            run_dir: the folder that is to be used, which may be the one that the recipe names.
        """
        here = cls(file.resolve().parent)
        if run_dir is None or file.name != here.config.name or not here.checkpoints.is_dir():
            return None
        with explained(f"{file}", "put back the file that fit wrote", also=(yaml.YAMLError,)):
            recipe = load_yaml(file.read_text(encoding="utf-8"))
        is_named_there = isinstance(recipe, dict) and recipe.get("run_dir") == run_dir
        return here if is_named_there and Path(run_dir).resolve() != here.root else None

    def recipe(self) -> dict[str, Any]:
        """What ``config`` holds.

        Raises:
            RecipeError: it is damaged.
        """
        with explained(f"{self.config}", "put back the file that fit wrote", also=(yaml.YAMLError,)):
            found = load_yaml(self.config.read_text(encoding="utf-8"))
            is_whole = isinstance(found["model"], dict) and isinstance(found["data"].get("init_args", {}), dict)
            is_whole = is_whole and isinstance(found["trainer"], dict)
            if not is_whole or not isinstance(found["seed_everything"], int | None):
                raise ValueError("model, data or seed_everything is no longer what fit wrote")
        return found

    def last_checkpoint(self) -> Path:
        """The newest good checkpoint, which ``--ckpt_path last`` names.

        Raises:
            RecipeError: there is none.
        """
        if not self.has_checkpoint:
            raise RecipeError(
                f"there is no checkpoint in {self.checkpoints}: the run ended before its first one; start it again "
                "with the same command without --ckpt_path, or with --resume auto in its place, which does either"
            )
        return newest_good(self.checkpoints)

    def create(self) -> None:
        """Create the folder, or see that it can be written to.

        Raises:
            RecipeError: it cannot.
        """
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            probe = self.root / f".write-{os.getpid()}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise _unwritable(self.root, error) from error

    def claim(self, resuming: bool) -> None:
        """Create the folder for a run of this process, and let no other process run in it.

        Raises:
            RecipeError: it cannot be written, another process runs in it, or it holds another run that would be
                overwritten.
        """
        self.create()
        lock_run(self.root)
        if not resuming and self.config.exists():
            if self.has_checkpoint or self.adapter.exists() or self.merged.exists():
                raise RecipeError(
                    f"run_dir={str(self.root)!r} holds a run already; resume it with --ckpt_path last, "
                    "or give another --run_dir"
                )
            rank_zero_info(f"the earlier run in {self.root} ended before its first checkpoint: started again")


def _unwritable(root: Path, error: OSError) -> RecipeError:
    return RecipeError(
        f"run_dir={str(root)!r} cannot be written ({error.strerror}); give another one with --run_dir DIR"
    )


_TIME = "%Y-%m-%d_%H-%M-%S"
_NAME = re.compile(r"(\d{4}(?:-\d\d){2}_(?:\d\d-){2}\d\d)(?:-(\d+))?")


def _order(run: Path) -> tuple[str, int]:
    """The place of a run among the recipe's, by its name: times of files change with copies and clocks."""
    if match := _NAME.fullmatch(run.name):
        return match[1], int(match[2] or 1)
    return datetime.fromtimestamp(run.stat().st_mtime).strftime(_TIME), 1


def new_run(recipe: str, create: bool = False) -> RunFolder:
    """``checkpoints/runs/<recipe>/<time>``, after all that are there, whatever the clock says.

    Args:
        recipe: name of the recipe.
        create: make the folder, so that no other process gets the same name.

    Raises:
        RecipeError: the folder cannot be made.
    """
    named = [run for run in (RUNS / recipe).glob("*") if _NAME.fullmatch(run.name)]
    time, number = max([(datetime.now().strftime(_TIME), 0), *map(_order, named)])
    while True:
        number += 1
        run = RunFolder(RUNS / recipe / (time if number == 1 else f"{time}-{number}"))
        if not create:
            return run
        try:
            run.root.mkdir(parents=True)
            return run
        except FileExistsError:
            continue
        except OSError as error:
            raise _unwritable(run.root, error) from error


def newest_run(recipe: str) -> RunFolder:
    """The recipe's run that started last, of those that have a checkpoint to resume from.

    Raises:
        RecipeError: there is none.
    """
    if not (runs := _runs_with_checkpoints(recipe)):
        raise RecipeError(
            f"no run of {recipe!r} under {RUNS / recipe} has a checkpoint; give its folder with --run_dir DIR"
        )
    return runs[-1]


def unfinished_run(recipe: str) -> RunFolder | None:
    """The recipe's newest run that can be resumed, has not come to its end and is not running; None without one."""
    ended = [run for run in _runs_with_checkpoints(recipe) if not is_running(run.root)]
    runs = [run for run in ended if finished_step(run.finished) is None]
    return runs[-1] if runs else None


def _runs_with_checkpoints(recipe: str) -> list[RunFolder]:
    """A recipe's runs, in the order in which they started."""
    runs = [RunFolder(path.parent) for path in (RUNS / recipe).glob("*/checkpoints")]
    return sorted((run for run in runs if run.has_checkpoint), key=lambda run: _order(run.root))
