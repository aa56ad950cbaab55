"""LLaMA-Factory's supervised fine-tuning. Options: any key of its YAML files."""

# mypy: disable-error-code="import-not-found"

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from datasets import Dataset, DatasetDict

from benchmarks.peers.job import Job, Measured, serve
from benchmarks.peers.transformers_trainer import Clock, arguments, losses_of

if find_spec("torchaudio") is None:  # imported whatever the task; text never calls it (see environments.CUDA_BUILDS)
    sys.modules["torchaudio"] = ModuleType("torchaudio")
    sys.modules["torchaudio"].__spec__ = ModuleSpec("torchaudio", None)

from llamafactory.train.tuner import run_exp


class LossClock(Clock):
    """Clock that stores the losses too, because the trainer is not accessible after the run."""

    def on_train_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        """Store the losses."""
        self.measured.losses = losses_of(state)


def run(job: Job) -> Measured:
    """Train on tokenized rows, which LLaMA-Factory reads from ``tokenized_path``."""
    measured = Measured()
    tokens = Path(job.folder) / "tokens"
    rows = [{**row, "attention_mask": [1] * len(row["input_ids"])} for row in job.read_rows()]
    DatasetDict({"train": Dataset.from_list(rows)}).save_to_disk(tokens)
    settings = arguments(job) | {
        "model_name_or_path": job.model,
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "lora",
        "lora_rank": job.lora["r"],
        "lora_alpha": job.lora["lora_alpha"],
        "lora_dropout": job.lora["lora_dropout"],
        "lora_target": ",".join(job.lora["target_modules"]),
        "dataset": "rows",  # a name is required, but tokenized_path is read
        "tokenized_path": str(tokens),
        "template": "default",
        "disable_shuffling": True,
        "overwrite_output_dir": True,
        "report_to": "none",
        "bf16": True,
    }
    run_exp(settings | job.options, [LossClock(measured)])
    return measured


if __name__ == "__main__":
    serve(run)
