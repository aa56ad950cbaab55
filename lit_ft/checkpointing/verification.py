"""Verification of checkpoints, run folders and exported folders against their checksums."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from lit_callbacks.export.manifest import MANIFEST, ManifestError, verify_manifest

from lit_ft.checkpointing.storage import checksum
from lit_ft.checkpointing.storage.integrity import META, DamagedCheckpoint, check_intact
from lit_ft.errors import RecipeError

_NAMES = "name a checkpoint, a run's folder, or an exported folder"


class Finding(NamedTuple):
    """Result of the verification of one checkpoint or folder."""

    path: Path
    state: Literal["good", "damaged", "without sums"]
    detail: str = ""


def verify(path: Path) -> list[Finding]:
    """Compare all checksums under a path with the bytes of the files.

    Args:
        path: checkpoint (file or folder), run folder, or folder of an exported adapter or model.

    Raises:
        RecipeError: the path does not exist, or holds nothing of these.
    """
    if not path.exists():
        raise RecipeError(f"{str(path)!r} does not exist; {_NAMES}")
    if not path.is_dir() and not path.is_file():
        raise RecipeError(f"{str(path)!r} is neither a file nor a folder; {_NAMES}")
    if path.is_file() and path.suffix != ".ckpt" and not checksum.begins_as_checkpoint(path):
        raise RecipeError(f"{str(path)!r} is no checkpoint; {_NAMES}")
    if path.is_file() or _is_checkpoint_folder(path):
        return [_of_checkpoint(path)]
    checkpoints = [*sorted(path.glob("checkpoints/*.ckpt")), *sorted(path.glob("*.ckpt"))]
    findings = [_of_checkpoint(checkpoint) for checkpoint in checkpoints if not checkpoint.is_symlink()]
    findings += [_of_export(folder) for folder in _exports(path)]
    if not findings:
        raise RecipeError(f"{str(path)!r} holds no checkpoint and no exported model")
    return findings


def _is_checkpoint_folder(path: Path) -> bool:
    return path.suffix == ".ckpt" or (path / META).is_file()


def _exports(path: Path) -> Iterator[Path]:
    for folder in [path, *sorted(subfolder for subfolder in path.iterdir() if subfolder.is_dir())]:
        if not _is_checkpoint_folder(folder) and any(
            (folder / name).is_file() for name in (MANIFEST, "adapter_config.json", "config.json")
        ):
            yield folder


def _of_checkpoint(path: Path) -> Finding:
    try:
        return Finding(path, "good" if check_intact(path) else "without sums")
    except DamagedCheckpoint as error:
        return Finding(path, "damaged", error.damage)


def _of_export(folder: Path) -> Finding:
    try:
        differences = verify_manifest(folder)
    except FileNotFoundError:
        return Finding(folder, "without sums")
    except ManifestError as error:
        return Finding(folder, "damaged", str(error))
    return Finding(folder, "damaged" if differences.damaged else "good", str(differences))
