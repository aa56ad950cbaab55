"""The same LoRA run by transformers.Trainer + PEFT gives the same losses."""

from pathlib import Path
from typing import Any

import pytest
import torch
from one_process import train
from peft import LoraConfig, get_peft_model
from shared_fixtures import record_difference

pytest.importorskip("accelerate")
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainingArguments

from lit_ft import TextDataModule


def lora() -> LoraConfig:
    return LoraConfig(r=8, lora_alpha=32, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


@pytest.mark.slow
@pytest.mark.parametrize(("size", "accumulate"), [(8, 1), (2, 4)])
def test_eight_steps_of_adamw(
    make_trainer: Any, model_folder: str, write_rows: Any, tmp_path: Path, monkeypatch: Any, size: int, accumulate: int
) -> None:
    path = write_rows(count=64)
    monkeypatch.setattr("one_process.sgd", lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.0))
    monkeypatch.setattr("one_process.STEPS", 8)
    got, _ = train(
        make_trainer, model_folder, path, peft=lora(), micro_batch_size=size, accumulate=accumulate, shuffle=False
    )

    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    data = TextDataModule(path)
    data.load(tokenizer)
    samples = data.splits["train"]
    rows = [
        {"input_ids": ids.tolist(), "labels": labels.tolist()} for ids, labels in map(samples.__getitem__, range(64))
    ]
    torch.manual_seed(7)  # as lit_ft seeds new weights: LoRA's A must be the same
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(model_folder), lora())
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            str(tmp_path / "peer"),
            per_device_train_batch_size=size,
            gradient_accumulation_steps=accumulate,
            num_train_epochs=1,
            learning_rate=1e-3,
            weight_decay=0.0,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            train_sampling_strategy="sequential",
            disable_tqdm=True,
        ),
        train_dataset=rows,
        data_collator=DataCollatorForSeq2Seq(tokenizer, padding=True),
    )
    trainer.train()
    wanted = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(got) == len(wanted) == 8
    record_difference(list(zip(got, wanted, strict=True)), [])
    assert got == pytest.approx(wanted, abs=1e-4)
    assert wanted[-1] < wanted[0] - 0.01  # something was learned
