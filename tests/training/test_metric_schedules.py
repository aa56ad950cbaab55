"""Schedules that read a metric, in runs that are stopped and resumed."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.cli import ReduceLROnPlateau
from torch.optim import AdamW

from lit_ft import CausalLM, TextDataModule


class SaveEverywhere(Checkpoint):
    """Checkpoints after each micro-batch, validation and epoch; Lightning calls it after other callbacks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.folder / f"step-{trainer.global_step}.ckpt")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.save_checkpoint(self.folder / f"validation-{trainer.global_step}.ckpt")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.save_checkpoint(self.folder / f"epoch-{trainer.global_step}.ckpt")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("monitor", "validation"),
    [
        ("val/loss", {}),
        ("val/loss", {"val_check_interval": 0.5}),
        ("train/loss", {"check_val_every_n_epoch": 2}),
    ],
)
def test_a_resumed_run_has_the_steps_of_one_that_was_not_stopped(
    make_trainer: Any, model_folder: str, write_rows: Any, tmp_path: Path, monitor: str, validation: dict[str, Any]
) -> None:
    path = write_rows(count=8)

    def fit(*callbacks: Any, ckpt_path: Path | None = None) -> dict[str, Any]:
        # Every value is a bad one after the first, so that each step lowers the learning rate.
        schedule: Any = partial(ReduceLROnPlateau, monitor=monitor, patience=0, mode="max", threshold=10.0)
        trainer = make_trainer(max_epochs=2, callbacks=[*callbacks], enable_checkpointing=bool(callbacks), **validation)
        data = TextDataModule(path, val_path=path, micro_batch_size=4)
        trainer.fit(CausalLM(model_folder, lr_scheduler=schedule), data, ckpt_path=ckpt_path)
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        return {**trainer.lr_scheduler_configs[0].scheduler.state_dict(), "rate": rate}

    expected = fit(SaveEverywhere(tmp_path))
    saved = sorted(tmp_path.glob("*.ckpt"))
    assert {one.name.split("-")[0] for one in saved} == {"step", "validation", "epoch"}
    assert expected["last_epoch"] == 2
    assert expected["rate"] == pytest.approx(1e-5)
    different = {one.name: got for one in saved if (got := fit(ckpt_path=one)) != expected}
    assert not different, expected


def test_a_schedule_of_a_subclass_that_steps_after_each_batch(
    make_trainer: Any, model_folder: str, write_rows: Any
) -> None:
    class StepsByBatch(CausalLM):
        def configure_optimizers(self) -> Any:
            optimizer = AdamW(self.parameters(), lr=1e-3)
            schedule = ReduceLROnPlateau(optimizer, monitor="train/loss", patience=0, mode="max", threshold=10.0)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": schedule, "monitor": "train/loss", "interval": "step"},
            }

    trainer = make_trainer(max_epochs=1)
    trainer.fit(StepsByBatch(model_folder), TextDataModule(write_rows(count=12), micro_batch_size=4))
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 3
