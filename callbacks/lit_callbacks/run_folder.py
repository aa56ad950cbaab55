"""Folder for the files of callbacks."""

from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn


def is_url(path: str | Path) -> bool:
    """Whether a path is that of another file system, e.g. of an object store: ``Path`` would damage it."""
    return "://" in str(path)


def run_folder(trainer: Trainer) -> Path:
    """Folder of a run on this machine: ``default_root_dir``, or the working directory if that is a URL.

    Callbacks append to their files and read them again, which object stores cannot do. A warning says where they are.
    """
    root = str(trainer.default_root_dir)
    if not is_url(root):
        return Path(root)
    folder = Path.cwd()
    rank_zero_warn(
        f"default_root_dir={root!r} is not on this machine, and callbacks write on this machine only: their files are "
        f"in {str(folder)!r}; give each a folder=, path= or dirpath= for another place"
    )
    return folder
