"""The newest state of a run as ``last.ckpt``, whatever the recipe's own ``ModelCheckpoint`` keeps."""

import os
from pathlib import Path

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint

from lit_ft.internals.lightning import note_last_file
from lit_ft.protocols import Checkpoint as Saved


class LastCheckpoint(Checkpoint):
    """Save ``last.ckpt`` at the end of each epoch, and so of the run, unless this step is already saved.

    A ``ModelCheckpoint`` with a ``monitor``, ``every_n_train_steps`` or a ``val_check_interval`` saves at other steps,
    and one without ``save_last`` keeps only the best: the end of the run would be lost.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._saved_step: int | None = None

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: Saved) -> None:
        """Note the step; a checkpoint of weights alone, which cannot be resumed, does not call this."""
        self._saved_step = trainer.global_step

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save, after all other checkpoint callbacks."""
        is_saved = self._saved_step == trainer.global_step and self._all_save_here(trainer)
        if not is_saved and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            path = self.folder / "last.ckpt"
            trainer.save_checkpoint(path, weights_only=False)
            for one in trainer.checkpoint_callbacks:
                if isinstance(one, ModelCheckpoint) and _writes(one, path):
                    note_last_file(one, path)

    def _all_save_here(self, trainer: Trainer) -> bool:
        here = os.path.realpath(self.folder)
        others = [one for one in trainer.checkpoint_callbacks if isinstance(one, ModelCheckpoint)]
        return all(os.path.realpath(one.dirpath or "") == here for one in others)


def _writes(callback: ModelCheckpoint, path: Path) -> bool:
    own = Path(callback.dirpath or "") / f"{callback.CHECKPOINT_NAME_LAST}{callback.FILE_EXTENSION}"
    return bool(callback.save_last) and own.resolve() == path.resolve()
