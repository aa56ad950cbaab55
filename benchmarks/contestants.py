"""One training run in a process of its own; prints what it measured as a line of JSON.

Time is taken from the end of the first optimiser step to the end of the last, so that loading and
first allocations are in nobody's figure. Samples come in the file's order, without shuffling.
"""

import json
import resource
import sys
import time
from typing import Any

from benchmarks.workload import LORA, Work


def run_lit_ft(work: Work, weights: Any) -> dict[str, Any]:
    """lit_ft as its command line runs it: CSV metrics, throughput, graceful stop."""
    import tempfile

    from lightning.pytorch import Callback, Trainer, seed_everything
    from lit_callbacks import GracefulStop, ThroughputMonitor
    from peft import LoraConfig

    from lit_ft import CausalLM, TextDataModule
    from lit_ft.reporting import MetricsCSV
    from lit_ft.run_folder import RunFolder

    class Clock(Callback):
        def __init__(self) -> None:
            self.ends: list[float] = []
            self.losses: list[float] = []

        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            if trainer.global_step > len(self.ends):
                self.ends.append(time.perf_counter())
                self.losses.append(float(trainer.callback_metrics["train/loss"]))

    seed_everything(0, verbose=False)
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            accelerator=accelerator(),
            devices=1,
            max_epochs=1,
            accumulate_grad_batches=work.accumulate,
            log_every_n_steps=1,
            logger=MetricsCSV(RunFolder(root=_path(folder))),
            callbacks=[clock, ThroughputMonitor(), GracefulStop()],
            enable_checkpointing=False,
            enable_model_summary=False,
        )
        data = TextDataModule(
            work.data, micro_batch_size=work.micro_batch_size, max_length=work.max_length, shuffle=False
        )
        trainer.fit(CausalLM(work.model, dtype=weights, peft=LoraConfig(**LORA)), data)
    samples = data.splits["train"]
    return {"losses": clock.losses, "ends": clock.ends, "lengths": samples.lengths.tolist()}


def run_transformers(work: Work, weights: str) -> dict[str, Any]:
    """``transformers.Trainer`` + PEFT on padded batches; float32 weights train with ``bf16=True``."""
    import tempfile

    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        DataCollatorForSeq2Seq,
        Trainer,
        TrainerCallback,
        TrainingArguments,
        set_seed,
    )

    from lit_ft.data.text_data import TextDataModule

    tokenizer = AutoTokenizer.from_pretrained(work.model)
    data = TextDataModule(work.data, max_length=work.max_length)
    data.load(tokenizer)
    samples = data.splits["train"]
    rows = [
        {"input_ids": ids.tolist(), "labels": labels.tolist(), "attention_mask": [1] * len(ids)}
        for ids, labels in (samples[i] for i in range(len(samples)))
    ]
    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    set_seed(0)
    model = AutoModelForCausalLM.from_pretrained(work.model, dtype=getattr(torch, weights))
    model = get_peft_model(model, LoraConfig(**LORA))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=work.micro_batch_size,
            gradient_accumulation_steps=work.accumulate,
            num_train_epochs=1,
            learning_rate=1e-4,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            weight_decay=0.01,
            bf16=weights == "float32",
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=accelerator() == "cpu",
            dataloader_pin_memory=False,
            train_sampling_strategy="sequential",
            disable_tqdm=True,
        )
        collator = DataCollatorForSeq2Seq(tokenizer, padding=True)
        trainer = Trainer(model=model, args=arguments, train_dataset=rows, data_collator=collator, callbacks=[Clock()])
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"losses": losses, "ends": ends, "lengths": samples.lengths.tolist()}


RUNNERS = {"lit_ft": run_lit_ft, "transformers": run_transformers}


def accelerator() -> str:
    """``cuda`` where there is one, else ``cpu``."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _path(folder: str) -> Any:
    from pathlib import Path

    return Path(folder)


def measure(runner: str, work: Work, weights: str) -> dict[str, Any]:
    """Run, and derive the rates; the first optimiser step is left out of them."""
    import torch

    result = RUNNERS[runner](work, weights)
    tokens = sum(result["lengths"][work.samples_per_step :])
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else _peak_rss()
    return {
        "tokens_per_second": tokens / (result["ends"][-1] - result["ends"][0]),
        "peak_memory_gib": peak / 2**30,
        "losses": result["losses"],
        "tokens": tokens,
    }


def _peak_rss() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    print("RESULT " + json.dumps(measure(sys.argv[1], Work(**json.loads(sys.argv[2])), sys.argv[3])))
