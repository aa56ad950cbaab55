"""``transformers.Trainer`` + PEFT. Options: any of ``TrainingArguments``; ``weights``, ``padding_free``."""

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    DataCollatorWithFlattening,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
    set_seed,
)

from benchmarks.peers.job import LEARNING_RATE, WEIGHT_DECAY, Job, Measured, serve


class Clock(TrainerCallback):
    """Callback that records the end of each optimizer step."""

    def __init__(self, measured: Measured) -> None:
        """Record into ``measured``."""
        self.measured = measured

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Record the end of the step."""
        self.measured.step_ended()


def arguments(job: Job) -> dict[str, Any]:
    """Arguments of all trainers that derive from this one."""
    return {
        "output_dir": str(Path(job.folder) / "output"),
        "per_device_train_batch_size": job.micro_batch_size,
        "gradient_accumulation_steps": job.accumulate,
        "num_train_epochs": 1,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "weight_decay": WEIGHT_DECAY,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": job.device == "cpu",
        "dataloader_pin_memory": job.device != "cpu",
        "train_sampling_strategy": "sequential",
        "disable_tqdm": True,
        "seed": 0,
    }


def losses_of(state: TrainerState) -> list[float]:
    """Logged loss of each optimizer step."""
    return [entry["loss"] for entry in state.log_history if "loss" in entry]


def base_model(job: Job, options: dict[str, Any], model_of: Any = AutoModelForCausalLM) -> Any:
    """Load the model; takes ``weights`` (by default float32) and ``attn_implementation`` out of the options."""
    dtype, attention = options.pop("weights", "float32"), options.pop("attn_implementation", None)
    return model_of.from_pretrained(job.model, dtype=getattr(torch, dtype), attn_implementation=attention)


def run(job: Job) -> Measured:
    """Train the job."""
    options: dict[str, Any] = {"bf16": True, **job.options}
    set_seed(0)
    model = get_peft_model(base_model(job, options), LoraConfig(**job.lora))
    if options.get("gradient_checkpointing"):
        model.enable_input_require_grads()
    collator = (
        DataCollatorWithFlattening()
        if options.pop("padding_free", False)
        else DataCollatorForSeq2Seq(AutoTokenizer.from_pretrained(job.model), padding=True)
    )
    measured = Measured()
    trainer = Trainer(
        model=model,
        args=TrainingArguments(**arguments(job), **options),
        train_dataset=[{**row, "attention_mask": [1] * len(row["input_ids"])} for row in job.read_rows()],
        data_collator=collator,
        callbacks=[Clock(measured)],
    )
    trainer.train()
    measured.losses = losses_of(trainer.state)
    return measured


if __name__ == "__main__":
    serve(run)
