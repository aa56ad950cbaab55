"""TRL's ``DPOTrainer``. Options: any of ``DPOConfig``, and ``adapter``. Rows: texts of prompt, chosen, rejected."""

from typing import Any

from datasets import Dataset
from peft import PeftModel
from transformers import AutoTokenizer
from trl import DPOConfig, DPOTrainer

from benchmarks.peers.job import Job, Measured, serve
from benchmarks.peers.transformers_trainer import Clock, arguments, base_model, losses_of


def run(job: Job) -> Measured:
    """Train the job; the first time of ``ends`` is that of the beginning, before the reference is computed."""
    options: dict[str, Any] = {"max_length": job.max_length, "bf16": False, "gradient_checkpointing": False}
    options |= job.options
    adapter, options["num_train_epochs"] = options.pop("adapter"), options.pop("epochs")
    measured = Measured()
    trainer = DPOTrainer(
        model=PeftModel.from_pretrained(base_model(job, options), adapter, is_trainable=True),
        args=DPOConfig(**(arguments(job) | options)),
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
