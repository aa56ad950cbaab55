"""Interface of Megatron checkpoints of any format, and the search for one in a folder."""

from argparse import Namespace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from lit_ft.errors import RecipeError
from lit_ft.megatron.families import Key
from lit_ft.megatron.layout import Layout


class MegatronSource(Protocol):
    """Megatron checkpoint, read a weight at a time."""

    arguments: Namespace
    """Arguments of the training that wrote it; empty if they are not recorded."""

    has_optimizer: bool
    """Whether it also holds an optimizer's state."""

    @property
    def layout(self) -> Layout | None:
        """Parallel layout of its files; None if the format has none."""

    @property
    def rows(self) -> int:
        """Rows of its embedding, with those that pad the vocabulary."""

    def names(self) -> set[str]:
        """Names of its weights, as ``Key.megatron`` spells them."""

    def parts(self, key: Key) -> list[Tensor]:
        """A weight: one tensor per tensor-parallel rank, or a single one that is whole."""

    def dtype(self, key: Key) -> torch.dtype:
        """Dtype of a weight."""


TRACKER = "latest_checkpointed_iteration.txt"
"""File that names the newest checkpoint of a folder."""


def checkpoint_folder(path: Path) -> Path:
    """Folder of a checkpoint: ``path`` itself, or the one that its ``latest_checkpointed_iteration.txt`` names.

    Raises:
        RecipeError: there is none.
    """
    tracker = path / TRACKER
    if not tracker.is_file():
        if path.is_dir() and (any(path.glob("mp_rank_*")) or (path / ".metadata").is_file()):
            return path
        raise RecipeError(
            f"{str(path)!r} is no Megatron checkpoint: neither {TRACKER} nor mp_rank_* nor .metadata is there; name "
            "the folder that --save named"
        )
    text = tracker.read_text(encoding="utf-8").strip()
    if text != "release" and not text.isdecimal():
        raise RecipeError(f"{tracker} says {text[:40]!r}, not a number of steps or release; put back the file")
    folder = path / (text if text == "release" else f"iter_{int(text):07d}")
    if not folder.is_dir():
        raise RecipeError(f"{tracker} names {folder.name}, which is not there; correct the file or copy the folder too")
    return folder
