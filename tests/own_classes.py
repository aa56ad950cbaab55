"""A user's classes: module and data module independent of lit_ft, a logger, and metrics beside those of CausalLM."""

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader

from lit_ft import CausalLM


class OwnModule(LightningModule):
    def __init__(self, size: int = 2) -> None:
        super().__init__()
        self.layer = nn.Linear(size, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        assert self.trainer.optimizers[0].param_groups[0]["lr"] == 0.5
        return self.layer(batch).mean()


class OwnData(LightningDataModule):
    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.ones(8, 3), batch_size=2)


class OwnLogger(CSVLogger):
    def __init__(self, save_dir: str = "here") -> None:
        super().__init__(save_dir, name="own", version="")


class LoggerOfARun(CSVLogger):
    def __init__(self, save_dir: str = "here") -> None:
        raise ConnectionError("a logger begins a run on a server")


class SeveralValidationSets(LightningDataModule):
    def train_dataloader(self) -> DataLoader:
        ids = torch.arange(3, 27).reshape(2, 12)
        return DataLoader([{"input_ids": row, "labels": row} for row in ids])

    def val_dataloader(self) -> list[DataLoader]:
        return [self.train_dataloader(), self.train_dataloader()]

    def test_dataloader(self) -> DataLoader:
        return self.train_dataloader()


class OwnMetric(Callback):
    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pl_module.log("val/own", 1.0)


class OwnCausalLM(CausalLM):
    def on_validation_epoch_end(self) -> None:
        super().on_validation_epoch_end()
        self.log("val/own", 1.0)
