"""The newest state of a run as ``last.ckpt``, whatever the recipe's own ``ModelCheckpoint`` keeps."""

import os
from pathlib import Path

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint

from lit_ft.internals.lightning import has_saved, note_last_file


class LastCheckpoint(Checkpoint):
    """Save ``last.ckpt`` at the end of each epoch, and so of the run, unless this step is already saved.

    A ``ModelCheckpoint`` with a ``monitor``, ``every_n_train_steps`` or a ``val_check_interval`` saves at other steps,
    and one without ``save_last`` keeps only the best: the end of the run would be lost.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let a resumed run replace its ``last.ckpt``, also by a ``ModelCheckpoint`` whose state was not restored."""
        for one, path in self._writers(trainer):
            if not one.last_model_path and trainer.strategy.broadcast(path.exists()):
                one.last_model_path = str(path)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save, after all other checkpoint callbacks."""
        is_saved = any(has_saved(one, trainer.global_step) for one in self._savers_here(trainer))
        if is_saved and not self._writers(trainer):  # an earlier one would not be the last
            is_saved = not trainer.strategy.broadcast((self.folder / "last.ckpt").exists())
        if not is_saved and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            path = self.folder / "last.ckpt"
            trainer.save_checkpoint(path, weights_only=False)
            for one, own in self._writers(trainer):
                note_last_file(one, own)

    def _writers(self, trainer: Trainer) -> list[tuple[ModelCheckpoint, Path]]:
        """Callbacks that write ``last.ckpt`` too, each with the path as it spells it."""
        every = [one for one in trainer.checkpoint_callbacks if isinstance(one, ModelCheckpoint) and one.save_last]
        paths = [Path(one.dirpath or "") / f"{one.CHECKPOINT_NAME_LAST}{one.FILE_EXTENSION}" for one in every]
        own = (self.folder / "last.ckpt").resolve()
        return [(one, path) for one, path in zip(every, paths, strict=True) if path.resolve() == own]

    def _savers_here(self, trainer: Trainer) -> list[ModelCheckpoint]:
        here = os.path.realpath(self.folder)
        savers = [one for one in trainer.checkpoint_callbacks if isinstance(one, ModelCheckpoint)]
        return [one for one in savers if os.path.realpath(one.dirpath or "") == here]
