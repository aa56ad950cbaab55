"""The newest good checkpoint of a folder."""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lit_ft.checkpointing.storage import replacement
from lit_ft.checkpointing.storage.integrity import META, DamagedCheckpoint, check_intact
from lit_ft.errors import RecipeError


class Position(NamedTuple):
    """Where in its run a checkpoint was written; later ones compare greater. Clocks are not asked."""

    session: int
    """How often the run had been started or resumed: one that went back to an earlier step is newer all the same."""
    global_step: int
    epoch: int
    is_last: bool


class Candidate(NamedTuple):
    """A checkpoint that a run could resume from."""

    position: Position
    path: Path


SESSION = "session"
"""Key of ``Position.session`` in a checkpoint."""
UNLOGGED = "unlogged_metrics"
"""Key of the last step's metrics, in a checkpoint that was written before they were logged."""


def candidates(folder: Path) -> tuple[list[Candidate], list[DamagedCheckpoint]]:
    """A folder's checkpoints, newest first, and those that cannot be read; their bytes are not compared yet.

    A checkpoint that a killed process left under its hidden name counts where nothing has the name it was to have.
    """
    found: list[Candidate] = []
    damaged: list[DamagedCheckpoint] = []
    visible = [path for path in folder.glob("*.ckpt") if not path.name.startswith(".") and path.exists()]
    for path in [*visible, *replacement.interrupted(folder)]:
        try:
            position = position_of(path)
        except DamagedCheckpoint as error:
            damaged.append(error)
            continue
        if position is not None:
            found.append(Candidate(position, path))
    return sorted(found, reverse=True), damaged


def newest_good(folder: Path) -> Path:
    """The newest checkpoint that is what was written; damaged ones are named.

    Raises:
        RecipeError: there is none.
    """
    found, damaged = candidates(folder)
    for _, path in found:
        try:
            has_sums = check_intact(path)
        except DamagedCheckpoint as error:
            damaged.append(error)
            continue
        for one in damaged:
            rank_zero_info(f"checkpoint {one.path} is damaged and left out: {one.damage}")
        if damaged:
            rank_zero_info(f"the newest good checkpoint is {path}")
        if not has_sums:
            rank_zero_info(f"{path} carries no SHA-256 sums (an earlier version wrote it): its bytes are not compared")
        return path
    if damaged:
        damages = "; ".join(f"{one.path.name}: {one.damage}" for one in damaged)
        raise RecipeError(f"no checkpoint in {folder} is good ({damages}); start anew with another --run_dir")
    raise RecipeError(f"there is no checkpoint to resume from in {folder}")


def newest_of(paths: Iterable[Path]) -> Path | None:
    """The newest of some checkpoints that can be read and resumed from; their bytes are not compared.

    Args:
        paths: of files and folders.
    """
    found: list[Candidate] = []
    for path in paths:
        with suppress(DamagedCheckpoint):
            if (position := position_of(path)) is not None:
                found.append(Candidate(position, path))
    return max(found).path if found else None


def position_of(path: Path) -> Position | None:
    """Where in its run a checkpoint was written; None of one without optimizer and loops, which no run resumes from.

    Raises:
        DamagedCheckpoint: it cannot be read.
    """
    content = _content(path)
    try:
        if "loops" not in content:
            return None
        step, epoch, session = (int(content.get(key, 0)) for key in ("global_step", "epoch", SESSION))
    except (TypeError, ValueError) as error:
        raise DamagedCheckpoint(path, f"it is no Lightning checkpoint ({type(error).__name__})") from error
    return Position(session, step, epoch, path.name.lstrip(".").startswith("last"))


def resumed_step(path: Path) -> tuple[int, bool]:
    """The optimizer steps of a checkpoint, and whether the last one's metrics were logged when it was written.

    Raises:
        DamagedCheckpoint: it cannot be read.
    """
    position = position_of(path)
    return (0, True) if position is None else (position.global_step, UNLOGGED not in _content(path))


def _content(path: Path) -> Any:
    file = path / META if path.is_dir() else path
    try:
        # Mapped, so that tensors are not read.
        return torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # what bytes that are no checkpoint raise is anything
        check_intact(path)  # says what the damage is
        raise DamagedCheckpoint(path, f"it cannot be read ({type(error).__name__})") from error
