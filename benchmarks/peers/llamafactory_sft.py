"""LLaMA-Factory's supervised fine-tuning. Options: any key of its YAML files."""

# mypy: disable-error-code="import-not-found"

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from datasets import Dataset, DatasetDict
from transformers import TrainerCallback

from benchmarks.peers.job import LEARNING_RATE, WEIGHT_DECAY, Job, Measured, serve

if find_spec("torchaudio") is None:  # imported whatever the task; text never calls it (see environments.CUDA_BUILDS)
    sys.modules["torchaudio"] = ModuleType("torchaudio")
    sys.modules["torchaudio"].__spec__ = ModuleSpec("torchaudio", None)

from llamafactory.train.tuner import run_exp


def run(job: Job) -> Measured:
    """Train on rows that are tokenised already, which LLaMA-Factory takes as ``tokenized_path``."""
    measured = Measured()

    class Clock(TrainerCallback):
        def on_step_end(self, *_: object, **__: object) -> None:
            measured.step_ended()

        def on_train_end(self, args: object, state: object, *_: object, **__: object) -> None:
            measured.losses = [entry["loss"] for entry in state.log_history if "loss" in entry]  # type: ignore[attr-defined]

    tokens = Path(job.folder) / "tokens"
    rows = [{**row, "attention_mask": [1] * len(row["input_ids"])} for row in job.read_rows()]
    DatasetDict({"train": Dataset.from_list(rows)}).save_to_disk(tokens)
    settings = {
        "model_name_or_path": job.model,
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "lora",
        "lora_rank": job.lora["r"],
        "lora_alpha": job.lora["lora_alpha"],
        "lora_dropout": job.lora["lora_dropout"],
        "lora_target": ",".join(job.lora["target_modules"]),
        "dataset": "rows",  # a name is asked for; what is read is tokenized_path
        "tokenized_path": str(tokens),
        "template": "default",
        "disable_shuffling": True,
        "output_dir": str(Path(job.folder) / "output"),
        "overwrite_output_dir": True,
        "per_device_train_batch_size": job.micro_batch_size,
        "gradient_accumulation_steps": job.accumulate,
        "num_train_epochs": 1,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "weight_decay": WEIGHT_DECAY,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": job.device == "cpu",
        "dataloader_pin_memory": job.device != "cpu",
        "disable_tqdm": True,
        "bf16": True,
        "seed": 0,
    }
    run_exp(settings | job.options, [Clock()])
    return measured


if __name__ == "__main__":
    serve(run)
