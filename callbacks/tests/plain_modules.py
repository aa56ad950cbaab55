"""Small modules of torch and lightning only, for the tests of the callbacks."""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

VOCABULARY = 32


class Digits(LightningModule):
    """An MLP on images of 8 x 8 pixels, ``(batch, 64)``, with labels ``(batch,)``."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val/loss", nn.functional.cross_entropy(self.layers(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class TinyLM(LightningModule):
    """A causal LM of one transformer layer; batches are ``input_ids``, ``attention_mask`` and ``labels``."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layer = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def losses(self, batch: dict[str, Tensor]) -> Tensor:
        """Loss of each token, ``(samples, length - 1)``."""
        ids = batch["input_ids"]
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device)
        logits = self.head(self.layer(self.embedding(ids), src_mask=mask, is_causal=True))
        return nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), batch["labels"][:, 1:], reduction="none")

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.losses(batch).mean()
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val/loss", self.losses(batch).mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def digits(count: int = 16, batch_size: int = 2) -> DataLoader:
    draw = torch.Generator().manual_seed(0)
    pictures = torch.randn(count, 64, generator=draw)
    return DataLoader([(picture, i % 10) for i, picture in enumerate(pictures)], batch_size=batch_size)


def texts(count: int = 16, batch_size: int = 2, length: int = 8, padding: int = 0, prompt: int = 0) -> DataLoader:
    """Data loader of samples of ``length`` tokens: the last ``padding`` are padding, the first ``prompt`` unlabeled."""
    draw = torch.Generator().manual_seed(0)
    rows = []
    for ids in torch.randint(0, VOCABULARY, (count, length), generator=draw):
        mask, labels = torch.ones(length, dtype=torch.long), ids.clone()
        mask[length - padding :] = 0
        labels[length - padding :] = -100
        labels[:prompt] = -100
        rows.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return DataLoader(rows, batch_size=batch_size)


def make_trainer(tmp_path: Path, **options: Any) -> Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
    return Trainer(**{**quiet, "default_root_dir": tmp_path, "max_epochs": 1, **options})
