"""``PreferenceLM`` from Python. Options: ``epochs``, ``adapter``. Rows: texts of prompt, chosen, rejected."""

import json
from functools import partial
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer

from benchmarks.peers.job import LEARNING_RATE, WEIGHT_DECAY, Job, Measured, serve
from benchmarks.peers.lit_ft_command import Clock
from lit_ft import PreferenceLM, TextDataModule


class ClockFromBeginning(Clock):
    """Clock that also records the beginning, before the reference is computed."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the beginning."""
        self.measured.step_ended()


def run(job: Job) -> Measured:
    """Train the job; the first time of ``ends`` is that of the beginning."""
    rows = Path(job.folder) / "pairs.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in job.read_rows()), encoding="utf-8")
    measured = Measured()
    module = PreferenceLM(
        job.model,
        adapter=job.options["adapter"],
        dtype="float32",
        optimizer=partial(torch.optim.AdamW, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY),
    )
    data = TextDataModule(
        str(rows),
        format="preference",
        max_length=job.max_length,
        micro_batch_size=job.micro_batch_size,
        shuffle=False,
        cache_dir=job.folder,
    )
    trainer = Trainer(
        accelerator=job.device,
        max_epochs=job.options["epochs"],
        accumulate_grad_batches=job.accumulate,
        callbacks=[ClockFromBeginning(measured)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, data)
    return measured


if __name__ == "__main__":
    serve(run)
