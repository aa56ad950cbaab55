"""Run folder: its name, and the paths of its files."""

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lit_ft.bounded_yaml import load_yaml
from lit_ft.checkpointing.selection import best_of, newest_good
from lit_ft.checkpointing.storage import replacement
from lit_ft.errors import RecipeError, explained
from lit_ft.run.lock import LOCK, is_running, lock_run, unwritable
from lit_ft.run.state import ended_by_time, finished_step
from lit_ft.run.time_limit import MaxTime, duration

RUNS = Path("checkpoints/runs")
LAST, BEST = "last", "best"
"""Names of a run's newest and best checkpoint, for ``--ckpt_path``."""


@dataclass(frozen=True)
class RunFolder:
    """Paths of the files of a run, all under ``root``."""

    root: Path

    @property
    def config(self) -> Path:
        """Resolved recipe, which ``fit --config`` accepts."""
        return self.root / "config.yaml"

    @property
    def checkpoints(self) -> Path:
        """Folder of the Lightning checkpoints: trainable weights, optimizer state, loop state."""
        return self.root / "checkpoints"

    @property
    def adapter(self) -> Path:
        """Folder of the exported adapter, for ``peft.PeftModel.from_pretrained``."""
        return self.root / "adapter"

    @property
    def merged(self) -> Path:
        """Folder of the exported merged model, for ``transformers.AutoModelForCausalLM.from_pretrained``."""
        return self.root / "merged"

    def exported(self, kind: str, ckpt_path: str) -> Path:
        """Folder where ``export`` writes by default.

        Args:
            kind: what is written, e.g. adapter or merged.
            ckpt_path: checkpoint that is exported, as it was named.
        """
        return self.root / (f"{kind}-{BEST}" if ckpt_path == BEST else kind)

    @property
    def finished(self) -> Path:
        """File that marks the run as finished, with its last optimizer step."""
        return self.root / "finished.json"

    @property
    def has_checkpoint(self) -> bool:
        """Whether the run has a checkpoint to resume from; no file is read."""
        return any(self.checkpoints.glob("*.ckpt")) or bool(replacement.interrupted(self.checkpoints))

    @classmethod
    def at(cls, path: str) -> "RunFolder":
        """Run folder of a path that a user gave, whether it is there or not."""
        return cls(Path(path).expanduser())

    @classmethod
    def of_config(cls, file: Path, run_dir: str | None) -> "RunFolder | None":
        """Find the run folder that contains a recipe, if the recipe names another one because it was copied or moved.

        Args:
            file: path of the recipe.
            run_dir: requested run folder, which may be the one that the recipe names.

        Returns:
            Run folder of the file; None if the file is not in a run folder, or does not name ``run_dir``.
        """
        here = cls(file.resolve().parent)
        if run_dir is None or file.name != here.config.name or not here.checkpoints.is_dir():
            return None
        with explained(f"{file}", "put back the file that fit wrote", also=(yaml.YAMLError,)):
            recipe = load_yaml(file.read_text(encoding="utf-8"))
        is_named_there = isinstance(recipe, dict) and recipe.get("run_dir") == run_dir
        return here if is_named_there and Path(run_dir).resolve() != here.root else None

    @classmethod
    def of_checkpoint(cls, path: Path) -> "RunFolder | None":
        """Run that a checkpoint lies in; None where the path is none."""
        run = cls(path.parent.parent)
        is_there = path.suffix == ".ckpt" and path.exists() and path.parent.name == run.checkpoints.name
        return run if is_there and run.config.is_file() else None

    def recipe(self) -> dict[str, Any]:
        """Load the resolved recipe.

        Raises:
            RecipeError: the file is damaged.
        """
        with explained(f"{self.config}", "put back the file that fit wrote", also=(yaml.YAMLError,)):
            recipe = load_yaml(self.config.read_text(encoding="utf-8"))
            is_whole = isinstance(recipe["model"], dict) and isinstance(recipe["data"].get("init_args", {}), dict)
            is_whole = is_whole and isinstance(recipe["trainer"], dict)
            if not is_whole or not isinstance(recipe["seed_everything"], int | None):
                raise ValueError("model, data or seed_everything is no longer what fit wrote")
        return recipe

    def last_checkpoint(self) -> Path:
        """Newest good checkpoint, which ``--ckpt_path last`` names.

        Raises:
            RecipeError: there is none.
        """
        self._check_has_checkpoint()
        return newest_good(self.checkpoints)

    def _check_has_checkpoint(self) -> None:
        if not self.has_checkpoint:
            if is_running(self.root):
                raise RecipeError(
                    f"there is no checkpoint in {self.checkpoints} yet: the run goes on, and writes its first one at a "
                    "validation or the end of an epoch; try again then"
                )
            if self.adapter.exists() or self.merged.exists():
                raise RecipeError(
                    f"there is no checkpoint in {self.checkpoints}: the run was to save none (trainer.fast_dev_run or "
                    "enable_checkpointing=false); start another one without --ckpt_path, in a new --run_dir"
                )
            raise RecipeError(
                f"there is no checkpoint in {self.checkpoints}: the run ended before its first one; start it again "
                "with the same command without --ckpt_path, or with --resume auto in its place, which does either"
            )

    def chosen_checkpoint(self, name: str) -> Path:
        """Checkpoint that ``last``, ``best`` or a path names.

        Raises:
            RecipeError: there is none.
        """
        if name == LAST:
            return self.last_checkpoint()
        if name == BEST:
            self._check_has_checkpoint()
            return best_of(self.checkpoints)
        if not (path := Path(name)).exists():
            near = get_close_matches(name.lower(), (LAST, BEST), n=1)
            advice = f"did you mean {near[0]}? Or " if near else ""
            raise RecipeError(
                f"ckpt_path={name!r} does not exist; {advice}name a file or folder .ckpt in checkpoints/ of a run, or "
                "`last` or `best`"
            )
        if RunFolder(path).checkpoints.is_dir():
            raise RecipeError(
                f"ckpt_path={name!r} is a run's folder; write --run_dir {name} --ckpt_path last, or name a checkpoint "
                f"in {RunFolder(path).checkpoints}"
            )
        if path.is_dir() and any(path.glob("*.ckpt")):
            raise RecipeError(f"ckpt_path={name!r} is a folder of checkpoints; name one of them, or `last` or `best`")
        return path

    def create(self) -> None:
        """Create the folder, and check that it is writable.

        Raises:
            RecipeError: it is not writable.
        """
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            probe = self.root / f".write-{os.getpid()}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise unwritable(self.root, error) from error

    def discard(self) -> None:
        """Remove the folder of a run that has ended before it wrote anything; one that holds something stays."""
        with suppress(OSError):  # it does not exist, or is not empty
            if [file.name for file in self.root.iterdir()] == [LOCK]:
                (self.root / LOCK).unlink()
            self.root.rmdir()

    def claim(self, resuming: bool) -> None:
        """Create the folder, and lock it for this process.

        Raises:
            RecipeError: it is not writable, another process runs in it, or it holds a run that would be
                overwritten.
        """
        self.create()
        lock_run(self.root)
        if not resuming and self.config.exists():
            if self.has_checkpoint or self.adapter.exists() or self.merged.exists():
                resume = "resume it with --ckpt_path last, or " if self.has_checkpoint else "it saved no checkpoint; "
                raise RecipeError(f"run_dir={str(self.root)!r} holds a run already; {resume}give another --run_dir")
            rank_zero_info(f"the earlier run in {self.root} ended before its first checkpoint: started again")


_TIME = "%Y-%m-%d_%H-%M-%S"
_NAME = re.compile(r"(\d{4}(?:-\d\d){2}_(?:\d\d-){2}\d\d)(?:-(\d+))?")


def _order(run: Path) -> tuple[str, int]:
    """Sort key of a run among those of its recipe, from its name: file times change with copies and clocks."""
    if match := _NAME.fullmatch(run.name):
        return match[1], int(match[2] or 1)
    return datetime.fromtimestamp(run.stat().st_mtime).strftime(_TIME), 1


def new_run(recipe: str, create: bool = False, runs: Path | None = None) -> RunFolder:
    """Choose a new run folder ``checkpoints/runs/<recipe>/<time>`` that sorts after all existing ones.

    Args:
        recipe: name of the recipe.
        create: whether to create the folder, so that no other process gets the same name.
        runs: folder in place of ``RUNS``.

    Raises:
        RecipeError: the folder cannot be created.
    """
    runs = runs or RUNS
    named = [run for run in (runs / recipe).glob("*") if _NAME.fullmatch(run.name)]
    time, number = max([(datetime.now().strftime(_TIME), 0), *map(_order, named)])
    while True:
        number += 1
        run = RunFolder(runs / recipe / (time if number == 1 else f"{time}-{number}"))
        if not create:
            return run
        try:
            run.root.mkdir(parents=True)
            return run
        except FileExistsError:
            continue
        except OSError as error:
            raise unwritable(run.root, error) from error


def newest_run(recipe: str) -> RunFolder:
    """Newest run of a recipe that has a checkpoint to resume from.

    Raises:
        RecipeError: there is none.
    """
    if not (runs := _runs_with_checkpoints(recipe)):
        raise RecipeError(
            f"no run of {recipe!r} under {RUNS / recipe} has a checkpoint; give its folder with --run_dir DIR"
        )
    return runs[-1]


def unfinished_run(recipe: str, max_time: MaxTime = None) -> RunFolder | None:
    """Newest run of a recipe that has a checkpoint, is not running and goes on; None if there is none.

    Args:
        recipe: name of the recipe.
        max_time: ``trainer.max_time`` of the command; a run that has ended by a shorter one goes on.
    """
    ended = [run for run in _runs_with_checkpoints(recipe) if not is_running(run.root)]
    runs = [run for run in ended if finished_step(run.finished) is None or _has_more_time(run, max_time)]
    return runs[-1] if runs else None


def _has_more_time(run: RunFolder, max_time: MaxTime) -> bool:
    """Whether a finished run ended by its ``trainer.max_time``, and a command gives it more."""
    if not ended_by_time(run.finished) or (before := run.recipe()["trainer"].get("max_time")) is None:
        return False
    earlier, now = duration(before), duration(max_time)
    return now is None or (earlier is not None and now > earlier)


def _runs_with_checkpoints(recipe: str) -> list[RunFolder]:
    """Runs of a recipe that have a checkpoint, in the order of their start."""
    runs = [RunFolder(path.parent) for path in (RUNS / recipe).glob("*/checkpoints")]
    return sorted((run for run in runs if run.has_checkpoint), key=lambda run: _order(run.root))
