"""Integrity checks of checkpoint files and folders, by SHA-256 sums."""

import os
from functools import lru_cache
from pathlib import Path

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lit_callbacks.export.manifest import ManifestError, verify_manifest

from lit_ft.checkpointing.storage import checksum
from lit_ft.errors import RecipeError
from lit_ft.internals import lightning as lightning_internals

META = "meta.pt"
"""File in a checkpoint folder with everything that is not a tensor."""
HAS_MANIFEST = "has_manifest"
"""Key in the ``meta.pt`` of a folder that has a manifest, so that a missing manifest is noticed."""
Identity = tuple[tuple[str, int, int], ...]
"""Name, size in bytes and time of modification in ns of each file of a checkpoint."""


class DamagedCheckpoint(RecipeError):
    """Error for a checkpoint whose bytes are not those that were written."""

    def __init__(self, path: Path, damage: str) -> None:
        super().__init__(
            f"checkpoint {str(path)!r} cannot be used: {damage}; --ckpt_path last takes the newest good one"
        )
        self.path, self.damage = path, damage


def check_intact(path: Path) -> bool:
    """Compare a checkpoint with the checksums that were written with it; each is read once per process, at disk speed.

    Returns:
        Whether there were checksums. A checkpoint of an earlier version has none.

    Raises:
        DamagedCheckpoint: the checkpoint differs, or is incomplete.
    """
    damage, has_sums = _compare(path, identity_of(path))
    if damage is not None:
        raise DamagedCheckpoint(path, damage)
    return has_sums


def check_on_rank_zero(path: Path) -> None:
    """Run ``check_intact`` on rank 0 only, and report a checkpoint without checksums.

    Raises:
        DamagedCheckpoint: the checkpoint is damaged; raised on rank 0 only.
    """
    if lightning_internals.rank() == 0 and not check_intact(path):
        rank_zero_info(f"{path} carries no SHA-256 sums (an earlier version wrote it): its bytes are not compared")


def identity_of(path: Path) -> Identity:
    """Identity of the files of a checkpoint; it changes with what they hold."""
    files = [Path(root, name) for root, _, names in os.walk(path) for name in names] if path.is_dir() else [path]
    stats = [(str(file), file.stat()) for file in sorted(files)]
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


@lru_cache(maxsize=64)
def _compare(path: Path, identity: Identity) -> tuple[str | None, bool]:
    try:
        return (_damage_of_folder(path) if path.is_dir() else checksum.verify(path)), True
    except checksum.NoChecksum:
        return None, False


def _damage_of_folder(path: Path) -> str | None:
    try:
        differences = verify_manifest(path)
    except FileNotFoundError:
        if (other := next((what for name, what in _OF_OTHERS.items() if (path / name).is_file()), None)) is not None:
            return other
        if _promises_manifest(path):
            return "its manifest.json is missing"
        raise checksum.NoChecksum from None
    except ManifestError as error:
        return str(error)
    return str(differences) if differences.damaged else None


_OF_OTHERS = {
    "adapter_config.json": "it is an adapter and no checkpoint of a run; a new run goes on with its weights: "
    "--model.peft null --model.adapter FOLDER",
    "config.json": "it is a model and no checkpoint of a run; a new run goes on with its weights: "
    "--model.pretrained FOLDER",
}
"""By a file of a folder without a manifest: what it is instead, e.g. a checkpoint of transformers' Trainer."""


def _promises_manifest(path: Path) -> bool:
    if not (path / META).is_file():
        return True
    try:
        return HAS_MANIFEST in torch.load(path / META, map_location="cpu", weights_only=True)
    except Exception:  # bytes that are not a checkpoint may raise anything
        return True
