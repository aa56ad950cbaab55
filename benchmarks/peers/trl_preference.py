"""TRL's ``DPOTrainer``, ``KTOTrainer`` and ``RewardTrainer``.

Options: any of their configs, ``adapter``, and ``objective``: dpo, kto or reward.
Rows: texts of prompt, chosen, rejected (dpo, reward), or of prompt, completion, label (kto).
"""

from typing import Any

from datasets import Dataset
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer

from benchmarks.peers.job import Job, Measured, serve
from benchmarks.peers.transformers_trainer import Clock, arguments, base_model, losses_of

_TRAINERS = {"dpo": (DPOConfig, DPOTrainer), "kto": (KTOConfig, KTOTrainer), "reward": (RewardConfig, RewardTrainer)}


def run(job: Job) -> Measured:
    """Train the job; the first time of ``ends`` is that of the beginning, before the reference is computed."""
    options: dict[str, Any] = {"max_length": job.max_length, "bf16": False, "gradient_checkpointing": False}
    options |= job.options
    adapter, options["num_train_epochs"] = options.pop("adapter"), options.pop("epochs")
    objective = options.pop("objective")
    config, trainer_of = _TRAINERS[objective]
    model_of = AutoModelForSequenceClassification if objective == "reward" else AutoModelForCausalLM
    measured = Measured()
    trainer = trainer_of(
        model=PeftModel.from_pretrained(base_model(job, options, model_of), adapter, is_trainable=True),
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
