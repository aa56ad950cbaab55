"""Fit of a lit_ft module from Python, without loggers and default callbacks."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from benchmarks.peers.job import LEARNING_RATE, WEIGHT_DECAY, Job, Measured
from benchmarks.peers.lit_ft_command import Clock
from lit_ft import TextDataModule

OPTIMIZER = partial(torch.optim.AdamW, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)


class ClockFromBeginning(Clock):
    """Clock that also records the beginning, before the reference is computed."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the beginning."""
        self.measured.step_ended()


def data_of(job: Job, **options: Any) -> TextDataModule:
    """Data of a job, in its order."""
    rows = Path(job.folder) / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in job.read_rows()), encoding="utf-8")
    sizes: dict[str, Any] = {"max_length": job.max_length, "micro_batch_size": job.micro_batch_size}
    return TextDataModule(str(rows), **sizes, shuffle=False, cache_dir=job.folder, **options)


def fit(job: Job, module: LightningModule, data: TextDataModule, clock: Clock) -> Measured:
    """Train a module on the data of a job."""
    trainer = Trainer(
        accelerator=job.device,
        max_epochs=job.options["epochs"],
        accumulate_grad_batches=job.accumulate,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, data)
    return clock.measured
