"""``litgpt finetune_lora``. Options: any argument of ``litgpt.finetune.lora.setup``.

LitGPT has a learning-rate schedule with warmup and cosine decay; here the rate is constant, as for all contestants.
"""

# mypy: disable-error-code="import-not-found"

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from litgpt.args import EvalArgs, TrainArgs
from litgpt.config import configs, name_to_config
from litgpt.data import DataModule, get_sft_collate_fn
from litgpt.finetune import lora
from litgpt.prompts import Default
from litgpt.scripts.convert_hf_checkpoint import convert_hf_checkpoint
from torch.utils.data import DataLoader

from benchmarks.peers.job import LEARNING_RATE, WEIGHT_DECAY, Job, Measured, serve

NAME = "Qwen2.5-0.5B"
"""Name of the converted folder, by which LitGPT selects the architecture."""


class Samples(list[dict[str, Any]]):
    """Rows in LitGPT's format; LitGPT reads ``data`` to get prompts for generation, which is the list itself."""

    def __init__(self, rows: list[dict[str, list[int]]]) -> None:
        """Convert rows to tensors."""
        super().__init__(
            {
                **{name: torch.tensor(values) for name, values in row.items()},
                "instruction": "",
                "token_counts": {name: len(row["input_ids"]) for name in ("raw", "raw_plus_prompt_template")},
            }
            for row in rows
        )

    @property
    def data(self) -> list[dict[str, Any]]:
        """The rows."""
        return self


class Rows(DataModule):
    """Data module of the job's rows, in their order."""

    def __init__(self, job: Job, pad_id: int) -> None:
        """Read the rows."""
        super().__init__()
        rows = job.read_rows()
        self.train_dataset, self.test_dataset = Samples(rows), Samples(rows[:1])
        self.batch_size, self.collate = job.micro_batch_size, get_sft_collate_fn(pad_id=pad_id)
        self.prompt_style = Default()

    def connect(self, *_: Any, **__: Any) -> None:
        """Ignore LitGPT's batch settings: the job's are used."""

    def train_dataloader(self) -> DataLoader[Any]:
        """All rows."""
        return DataLoader(self.train_dataset, batch_size=self.batch_size, collate_fn=self.collate)  # type: ignore[arg-type]

    def val_dataloader(self) -> DataLoader[Any]:
        """Validation data, which LitGPT requires and runs once."""
        return DataLoader(self.test_dataset, collate_fn=self.collate)  # type: ignore[arg-type]


def know_shape(model: Path) -> None:
    """Set the sizes of the job's model in LitGPT's architecture."""
    hf = json.loads((model / "config.json").read_text(encoding="utf-8"))
    config = next(config for config in configs if config["name"] == NAME)
    config |= {
        "padded_vocab_size": hf["vocab_size"],
        "vocab_size": hf["vocab_size"],
        "n_layer": hf["num_hidden_layers"],
        "n_head": hf["num_attention_heads"],
        "n_embd": hf["hidden_size"],
        "n_query_groups": hf["num_key_value_heads"],
        "intermediate_size": hf["intermediate_size"],
    }
    name_to_config[NAME] = config


def converted(model: Path) -> Path:
    """Folder of the model in LitGPT's format, next to the original; converted by LitGPT at the first call."""
    folder = model.parent / f"{model.name}-litgpt" / NAME
    if not (folder / "lit_model.pth").is_file():
        subprocess.run([sys.executable, "-m", __spec__.name, str(model), str(folder)], check=True)
    return folder


def convert(model: Path, folder: Path) -> None:
    """Convert a model to LitGPT's format."""
    know_shape(model)
    folder.mkdir(parents=True, exist_ok=True)
    for file in model.iterdir():
        (folder / file.name).unlink(missing_ok=True)
        (folder / file.name).symlink_to(file.resolve())
    convert_hf_checkpoint(folder, model_name=NAME, dtype="bfloat16")


def run(job: Job) -> Measured:
    """Train the job."""
    measured = Measured(note="losses are means of micro-batch means")
    folder = measured.prepare(lambda: converted(Path(job.model)))
    know_shape(Path(job.model))
    pad_id = json.loads((Path(job.model) / "config.json").read_text(encoding="utf-8"))["pad_token_id"]

    class Constant(torch.optim.lr_scheduler.LambdaLR):
        """Constant schedule and clock: LitGPT steps it after each optimizer step."""

        def step(self, epoch: int | None = None) -> None:
            super().step(epoch)
            if self.last_epoch:
                measured.step_ended()

    # Skip the work after training, which is not measured; the first function reads LitGPT's own command line.
    lora.save_hyperparameters = lora.merge_lora = lambda *_, **__: None
    lora.get_lr_scheduler = lambda optimizer, **_: Constant(optimizer, lambda _: 1.0)
    out = Path(job.folder) / "litgpt"
    lora.setup(
        checkpoint_dir=folder,
        out_dir=out,
        **{"precision": "bf16-true"} | job.options,
        lora_r=job.lora["r"],
        lora_alpha=job.lora["lora_alpha"],
        lora_dropout=job.lora["lora_dropout"],
        **{f"lora_{part}": f"{part[0]}_proj" in job.lora["target_modules"] for part in ("query", "key", "value")},
        lora_projection="o_proj" in job.lora["target_modules"],
        lora_mlp="up_proj" in job.lora["target_modules"],
        data=Rows(job, pad_id),
        train=TrainArgs(
            save_interval=None,
            log_interval=1,
            global_batch_size=job.micro_batch_size * job.accumulate,
            micro_batch_size=job.micro_batch_size,
            lr_warmup_steps=1,
            epochs=1,
        ),
        # No answer is generated, because max_new_tokens exceeds the model's context, and no validation runs.
        eval=EvalArgs(interval=10**9, max_new_tokens=10**6, max_iters=1, final_validation=False),
        optimizer={"class_path": "torch.optim.AdamW", "init_args": {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY}},
        seed=0,
    )
    measured.losses = _losses(out, job.accumulate)
    return measured


def _losses(out: Path, accumulate: int) -> list[float]:
    """Loss of each step: the running mean over its micro-batches, at the last one."""
    [path] = out.rglob("metrics.csv")
    with path.open(encoding="utf-8") as file:
        losses = [float(line["loss"]) for line in csv.DictReader(file) if line.get("loss")]
    return losses[accumulate - 1 :: accumulate]


if __name__ == "__main__":
    if sys.argv[1].endswith(".json"):
        serve(run)
    else:
        convert(Path(sys.argv[1]), Path(sys.argv[2]))
