"""Folder of a sweep, and its definition: ``sweep.json``, by which the same command finds it again."""

import json
from collections.abc import Mapping
from datetime import datetime
from itertools import count
from pathlib import Path

from lit_callbacks.durable_writes import write_durably

from lit_ft.errors import RecipeError, explained
from lit_ft.run.folder import RunFolder

SWEEPS = Path("checkpoints/sweeps")


def sweep_folder(given: str | None, recipe: str, definition: Mapping[str, object]) -> Path:
    """Choose the folder of a sweep: the one given, that of the same sweep, or a new ``SWEEPS/<recipe>/<time>``.

    Args:
        given: folder that the user has named; None to look for it.
        recipe: name of the recipe.
        definition: options by which two sweeps are the same.

    Raises:
        RecipeError: the folder given holds another sweep, or cannot be written.
    """
    if given is not None:
        folder = Path(given).expanduser()
        RunFolder(folder).create()
        if _definition(folder) not in (None, definition):
            raise RecipeError(
                f"--sweep_dir {given!r} holds another sweep (another recipe, --vary or --metric: {folder}/sweep.json); "
                "name another folder"
            )
        return folder
    earlier = sorted((SWEEPS / recipe).glob("*"), reverse=True)
    if same := [folder for folder in earlier if _definition(folder) == definition]:
        return same[0]
    time = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    names = (time if number == 1 else f"{time}-{number}" for number in count(1))
    folder = next(SWEEPS / recipe / name for name in names if SWEEPS / recipe / name not in earlier)
    RunFolder(folder).create()
    return folder


def write_definition(folder: Path, definition: Mapping[str, object]) -> None:
    """Write ``sweep.json``."""
    write_durably(folder / "sweep.json", json.dumps(definition, ensure_ascii=False, indent=2) + "\n")


def _definition(folder: Path) -> object:
    """Definition of the sweep in a folder; None without one."""
    path = folder / "sweep.json"
    if not path.is_file():
        return None
    with explained(str(path), "name another folder with --sweep_dir, or remove this one"):
        return json.loads(path.read_text(encoding="utf-8"))
