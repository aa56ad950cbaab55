"""Training of two plain modules with every callback: ``python run_alone.py ddp,fsdp FOLDER``, or ``single``.

A test runs it in a clean environment in which only lit_callbacks is installed.
"""

import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from lit_callbacks import (
    AdapterMerger,
    ForgettingProbe,
    GracefulStop,
    LossLedger,
    MemoryProfiler,
    RankFailureWatchdog,
    RunReport,
    SampleGenerations,
    SpikeGuard,
    ThroughputMonitor,
)
from plain_modules import VOCABULARY, Digits, TinyLM, digits, texts
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard


class Told(LightningModule):
    """Module that passes the loss of each sample to the ledger, and writes its weights itself."""

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            mesh = self.device_mesh["data_parallel"]
            for child in self.children():
                if isinstance(child, nn.Sequential | nn.TransformerEncoderLayer):
                    fully_shard(child, mesh=mesh)

    def save_adapter(self, folder: Path, state_dict: dict[str, Tensor] | None = None) -> None:
        folder.mkdir()
        (folder / "adapter_config.json").write_text("{}")
        torch.save(state_dict or self.state_dict(), folder / "weights.pt")


class ToldDigits(Told, Digits):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        losses = nn.functional.cross_entropy(self.layers(batch[0]), batch[1], reduction="none")
        self.log("train/loss", losses.mean())
        return {"loss": losses.mean(), "sample_losses": losses.detach()}

    def said(self, prompts: Sequence[str]) -> list[str]:
        return [str(int(self.layers(torch.ones(1, 64)).argmax())) for _ in prompts]

    def general_loss(self, pictures: Sequence[int]) -> tuple[Tensor, int]:
        logits = self.layers(torch.ones(len(pictures), 64))
        return nn.functional.cross_entropy(logits, torch.tensor(pictures), reduction="sum"), len(pictures)


class ToldText(Told, TinyLM):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        losses = self.losses(batch)
        self.log("train/loss", losses.mean())
        return {"loss": losses.mean(), "token_losses": losses.detach()}

    def said(self, prompts: Sequence[str]) -> list[str]:
        """Greedy answers of four tokens each, as numbers."""
        ids = torch.tensor([[int(word) for word in prompt.split()] for prompt in prompts])
        for _ in range(4):
            ids = torch.cat([ids, self.head(self.layer(self.embedding(ids)))[:, -1:].argmax(-1)], dim=1)
        return [" ".join(map(str, row[-4:])) for row in ids.tolist()]

    def general_loss(self, starts: Sequence[int]) -> tuple[Tensor, int]:
        ids = torch.stack([torch.arange(start, start + 8) % VOCABULARY for start in starts])
        losses = self.losses({"input_ids": ids, "labels": ids})
        return losses.sum(), losses.numel()


def ids_of(batch: Any) -> list[str]:
    """Ids of a batch's samples: their sums, which are distinct here."""
    rows = batch["input_ids"] if isinstance(batch, dict) else batch[0]
    return [f"{total:.6f}" for total in rows.double().sum(1).tolist()]


def main(kind: str, how: str, folder: Path) -> None:
    """Fit, and write the results for the test to ``said.json``."""
    seed_everything(0, verbose=False)
    module = ToldDigits() if kind == "digits" else ToldText()
    data, validation = (digits(32), digits(8)) if kind == "digits" else (texts(32, padding=2), texts(8))
    throughput, memory = ThroughputMonitor(flops=lambda batch: 1e6, peak="measure"), MemoryProfiler(folder / "memory")
    callbacks = [
        RankFailureWatchdog(),
        GracefulStop(),
        throughput,
        memory,
        SpikeGuard(),
        LossLedger(write_every_n_steps=4, ids=ids_of),
        ForgettingProbe(texts=[1, 2, 3], loss=lambda model, given: model.general_loss(given)),
        SampleGenerations(["1 2", "3 4"], every_n_steps=4, generate=lambda model, prompts: model.said(prompts)),
        AdapterMerger(folder / "adapter", every_n_steps=4, keep_last=1),
        RunReport(),
        ModelCheckpoint(folder / "checkpoints", monitor="val/loss"),
    ]
    strategy: Any = {"ddp": "ddp", "fsdp": ModelParallelStrategy(2, 1), "single": "auto"}[how]
    trainer = Trainer(
        accelerator="cpu",
        strategy=strategy,
        devices=1 if how == "single" else 2,
        callbacks=callbacks,
        logger=[CSVLogger(folder, name="csv", version=""), TensorBoardLogger(folder, name="tensorboard", version="")],
        default_root_dir=folder,
        max_steps=8,
        val_check_interval=4,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, data, validation)
    assert memory.breakdown is not None
    if trainer.is_global_zero:
        found = {name: importlib.util.find_spec(name) is not None for name in ("lit_ft", "transformers", "peft")}
        said = {"steps": trainer.global_step, "importable": found, "throughput": throughput.summary}
        (folder / "said.json").write_text(json.dumps(said | {"memory": memory.breakdown.bytes}))


if __name__ == "__main__":
    for how in sys.argv[1].split(","):
        for kind in ("digits", "text"):
            main(kind, how, Path(sys.argv[2]) / how / kind)
