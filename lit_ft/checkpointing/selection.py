"""Selection of the newest intact checkpoint in a folder, and of the best one."""

from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lit_ft.checkpointing.storage import replacement
from lit_ft.checkpointing.storage.integrity import META, DamagedCheckpoint, Identity, check_intact, identity_of
from lit_ft.errors import RecipeError
from lit_ft.protocols import Checkpoint


class Position(NamedTuple):
    """Position in its run at which a checkpoint was written; later ones compare greater. File times are not used."""

    session: int
    """Number of starts and resumptions of the run: a resumed run's checkpoint is newer even at an earlier step."""
    global_step: int
    epoch: int
    is_last: bool


class Candidate(NamedTuple):
    """Checkpoint from which a run could resume."""

    position: Position
    path: Path


SESSION = "session"
"""Key of ``Position.session`` in a checkpoint."""
UNLOGGED = "unlogged_metrics"
"""Key of the last step's metrics in a checkpoint that was written before they were logged."""


def candidates(folder: Path) -> tuple[list[Candidate], list[DamagedCheckpoint]]:
    """Readable checkpoints of a folder, newest first, and unreadable ones; checksums are not compared.

    A complete checkpoint that a killed process left under its temporary hidden name counts if its final name is unused.
    """
    visible = [path for path in folder.glob("*.ckpt") if not path.name.startswith(".") and path.exists()]
    return _readable([*visible, *replacement.interrupted(folder)])


def newest_of(paths: Iterable[Path]) -> Path | None:
    """Newest of some checkpoints that can be read and resumed from; checksums are not compared."""
    readable, _ = _readable(paths)
    return readable[0].path if readable else None


def _readable(paths: Iterable[Path]) -> tuple[list[Candidate], list[DamagedCheckpoint]]:
    readable: list[Candidate] = []
    damaged: list[DamagedCheckpoint] = []
    for path in paths:
        try:
            position = position_of(path)
        except DamagedCheckpoint as error:
            damaged.append(error)
            continue
        if position is not None:
            readable.append(Candidate(position, path))
    return sorted(readable, reverse=True), damaged


def newest_good(folder: Path) -> Path:
    """Newest checkpoint whose checksums match; damaged ones are reported.

    Raises:
        RecipeError: there is no intact checkpoint.
    """
    readable, damaged = candidates(folder)
    for _, path in readable:
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
    raise RecipeError(
        f"there is no checkpoint to resume from in {folder}: those in it hold weights alone (save_weights_only of a "
        "ModelCheckpoint); validate, predict, chat and export take one that --ckpt_path names; train with another "
        "--run_dir"
    )


def check_resumable(path: Path) -> None:
    """Check that a run can be resumed from a checkpoint.

    Raises:
        DamagedCheckpoint: it cannot be read.
        RecipeError: it holds weights alone.
    """
    if position_of(path) is None:
        raise weights_alone(str(path))


def has_training_state(content: Checkpoint) -> bool:
    """Whether a checkpoint holds what a fit goes on with, besides weights."""
    return "loops" in content and "optimizer_states" in content  # Lightning saves loops with weights alone too


def weights_alone(path: str) -> RecipeError:
    """Error about a checkpoint of weights alone from which a run is to go on."""
    return RecipeError(
        f"ckpt_path={path!r} holds weights alone (save_weights_only of a ModelCheckpoint, weights_only of "
        "save_checkpoint), no optimizer's state, and no run goes on from these; take --ckpt_path last, or start a new "
        "run from its export (--model.adapter or --model.pretrained), in Python from module.load_state_dict("
        "torch.load(FILE)['state_dict'], strict=False)"
    )


POSITIONS = ("epoch", "step")
"""What a ``ModelCheckpoint`` can monitor besides metrics: it then keeps the newest checkpoints; none is best."""


class Best(NamedTuple):
    """Checkpoint with the best value of a monitored metric."""

    path: Path
    monitor: str
    score: float


def best_known(folder: Path) -> list[Best]:
    """Best checkpoint of each metric that the run's ``ModelCheckpoint`` callbacks monitor, by its newest checkpoint."""
    readable, _ = candidates(folder)
    known: dict[str, Best] = {}
    # Several callbacks may save after the newest step, the first of them before a new best is known. What a callback
    # saves as its best says so itself.
    for path in [one.path for one in readable if one.position[:3] == readable[0].position[:3]]:
        for callback, best in _header(path).best.items():
            if callback not in known or best.path.name == path.name:
                known[callback] = best._replace(path=_here(folder, best.path))
    return list(known.values())


def best_of(folder: Path) -> Path:
    """Best checkpoint of a run, which ``--ckpt_path best`` names; its checksums match.

    Raises:
        RecipeError: no metric is monitored, several are, or the checkpoint is gone or damaged.
    """
    known = best_known(folder)
    if not known:
        raise RecipeError(
            f"ckpt_path=best: no checkpoint in {folder} is known as the best, because no ModelCheckpoint with a "
            "monitor has saved one; train with one (monitor: val/loss), or take ckpt_path=last"
        )
    if len(known) > 1:
        named = "; ".join(f"{path} has {monitor} {score:.4g}" for path, monitor, score in known)
        raise RecipeError(f"ckpt_path=best: several metrics are monitored, name the file: {named}")
    path, monitor, score = known[0]
    if not path.exists():
        raise RecipeError(f"ckpt_path=best: {path}, of {monitor} {score:.4g}, is no longer there; take ckpt_path=last")
    try:
        check_intact(path)
    except DamagedCheckpoint as error:
        raise RecipeError(f"ckpt_path=best: {path} is damaged ({error.damage}); take ckpt_path=last") from error
    rank_zero_info(f"the best checkpoint is {path}, of {monitor} {score:.4g}")
    return path


def _here(folder: Path, path: Path) -> Path:
    """Path of a checkpoint in a folder that may have been moved since."""
    return folder / path.name if (folder / path.name).exists() else path


def position_of(path: Path) -> Position | None:
    """Position in its run at which a checkpoint was written; None for one of weights alone, which cannot be resumed.

    Raises:
        DamagedCheckpoint: the checkpoint cannot be read.
    """
    return _header(path).position


def resumed_step(path: Path) -> tuple[int, frozenset[str] | None]:
    """Number of optimizer steps of a checkpoint, and the metrics of the last one that had not been logged by then.

    Returns:
        The number, and the metrics' names: none for a step that is not logged, None where all had been logged.

    Raises:
        DamagedCheckpoint: the checkpoint cannot be read.
    """
    header = _header(path)
    return (0, None) if header.position is None else (header.position.global_step, header.unlogged)


class _Header(NamedTuple):
    """Metadata of a checkpoint, without tensors, which would keep its file mapped."""

    position: Position | None
    """None for a checkpoint of weights alone."""
    unlogged: frozenset[str] | None
    """Names of the metrics of its step that had not been logged; None where all had been."""
    best: dict[str, Best]
    """Best checkpoint by callback, with the path of that time."""


def _header(path: Path) -> _Header:
    has_meta = path.is_dir() and (path / META).is_file()
    return _read_header(path, identity_of(path / META if has_meta else path))


@lru_cache(maxsize=10_000)  # all checkpoints of a run, which are looked at several times
def _read_header(path: Path, identity: Identity) -> _Header:
    """Header of a checkpoint, read once while its file stays the same: unpickling takes tens of milliseconds."""
    file = path / META if path.is_dir() else path
    try:
        # Memory-mapped, so that tensors are not read.
        content = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # bytes that are not a checkpoint may raise anything
        check_intact(path)  # its error describes the damage
        raise DamagedCheckpoint(path, f"it cannot be read ({type(error).__name__})") from error
    try:
        unlogged = frozenset(content[UNLOGGED]) if UNLOGGED in content else None
        return _Header(_position_in(path, content), unlogged, _best_in(content))
    except (AttributeError, TypeError, ValueError) as error:
        raise DamagedCheckpoint(path, f"it is no Lightning checkpoint ({type(error).__name__})") from error


def _position_in(path: Path, content: Checkpoint) -> Position | None:
    if not has_training_state(content):
        return None
    session, step, epoch = (int(content.get(key, 0)) for key in (SESSION, "global_step", "epoch"))
    return Position(session, step, epoch, is_last=path.name.lstrip(".").startswith("last"))


def _best_in(content: Checkpoint) -> dict[str, Best]:
    states: dict[str, Any] = content.get("callbacks", {}) if "loops" in content else {}
    return {
        callback: Best(Path(state["best_model_path"]), state["monitor"], float(state["best_model_score"]))
        for callback, state in states.items()
        if isinstance(state, dict)
        and state.get("monitor")
        and state["monitor"] not in POSITIONS
        and state.get("best_model_path")
        and state.get("best_model_score") is not None
    }
