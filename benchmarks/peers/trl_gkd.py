"""TRL's ``GKDTrainer``. Options: any of ``GKDConfig``, and those of ``lit_ft_distillation``. Rows: ``messages``."""

from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.experimental.gkd import GKDConfig, GKDTrainer

from benchmarks.peers.job import Job, Measured, serve
from benchmarks.peers.transformers_trainer import Clock, arguments, base_model, losses_of

SAME: dict[str, Any] = {"temperature": 1.0, "beta": 0.5, "bf16": False, "gradient_checkpointing": False}
"""Settings with which TRL does what lit_ft does."""


def run(job: Job) -> Measured:
    """Train the job; the first time of ``ends`` is that of the beginning."""
    options = {**SAME, "max_length": job.max_length, **job.options}
    teacher, new_tokens = options.pop("teacher"), options.pop("new_tokens")
    options |= {"num_train_epochs": options.pop("epochs"), "lmbda": 1.0 if new_tokens else 0.0}
    options |= {"max_new_tokens": new_tokens} if new_tokens else {}
    measured = Measured()
    trainer = GKDTrainer(
        model=base_model(job, options),
        teacher_model=AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32),
        args=GKDConfig(**{**arguments(job), **options}),
        train_dataset=Dataset.from_list(job.read_rows()),
        processing_class=AutoTokenizer.from_pretrained(job.model),
        callbacks=[Clock(measured)],
    )
    measured.step_ended()
    trainer.train()
    measured.losses = losses_of(trainer.state)
    return measured


if __name__ == "__main__":
    serve(run)
