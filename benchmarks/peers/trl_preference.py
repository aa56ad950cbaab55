"""TRL's ``DPOTrainer`` and ``KTOTrainer``. Options: any of their configs, ``adapter``, and ``objective``: dpo or kto.

Rows: texts of prompt, chosen, rejected (dpo), or of prompt, completion, label (kto).
"""

from typing import Any

from datasets import Dataset
from peft import PeftModel
from transformers import AutoTokenizer
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer

from benchmarks.peers.job import Job, Measured, serve
from benchmarks.peers.transformers_trainer import Clock, arguments, base_model, losses_of

_TRAINERS = {"dpo": (DPOConfig, DPOTrainer), "kto": (KTOConfig, KTOTrainer)}


def run(job: Job) -> Measured:
    """Train the job; the first time of ``ends`` is that of the beginning, before the reference is computed."""
    options: dict[str, Any] = {"max_length": job.max_length, "bf16": False, "gradient_checkpointing": False}
    options |= job.options
    adapter, options["num_train_epochs"] = options.pop("adapter"), options.pop("epochs")
    config, trainer_of = _TRAINERS[options.pop("objective")]
    measured = Measured()
    trainer = trainer_of(
        model=PeftModel.from_pretrained(base_model(job, options), adapter, is_trainable=True),
        args=config(**(arguments(job) | options)),
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
