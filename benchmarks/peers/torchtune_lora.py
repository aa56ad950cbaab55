"""torchtune's recipe ``lora_finetune_single_device``. Options: any key of its configs."""

# mypy: disable-error-code="import-not-found"

import json
import runpy
from pathlib import Path
from typing import Any

import torch
import torchtune
from omegaconf import OmegaConf

from benchmarks.peers.job import LEARNING_RATE, WEIGHT_DECAY, Job, Measured, serve

MEASURED = Measured()
"""Global, because torchtune instantiates its components by name."""


class PadId:
    """Tokenizer with the one attribute that torchtune reads if rows are tokenized."""

    def __init__(self, pad_id: int) -> None:
        """Store the id of the padding token."""
        self.pad_id = pad_id


def rows(_: PadId, path: str) -> list[dict[str, list[int]]]:
    """Data set of rows with ``tokens`` and ``labels``."""
    rows = json.loads(Path(path).read_text(encoding="utf-8"))
    return [{"tokens": row["input_ids"], "labels": row["labels"]} for row in rows]


def constant(optimizer: torch.optim.Optimizer, **_: Any) -> torch.optim.lr_scheduler.LambdaLR:
    """Constant learning-rate schedule."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)


class Losses:
    """Metric logger and clock: torchtune calls it at the end of each optimizer step."""

    def log_config(self, config: Any) -> None:
        """Ignore the config."""

    def log_dict(self, payload: dict[str, Any], step: int) -> None:
        """Record time and loss."""
        MEASURED.step_ended()
        MEASURED.losses.append(float(payload["loss"]))


def settings(job: Job) -> dict[str, Any]:
    """Config of the recipe: torchtune's own for Qwen2.5-0.5B, with the values of the job."""
    hf = json.loads((Path(job.model) / "config.json").read_text(encoding="utf-8"))
    here = "benchmarks.peers.torchtune_lora"
    output = str(Path(job.folder) / "output")
    return {
        "output_dir": output,
        "model": {
            "_component_": "torchtune.models.qwen2.lora_qwen2",
            "lora_attn_modules": list(job.lora["target_modules"]),
            "apply_lora_to_mlp": False,
            "lora_rank": job.lora["r"],
            "lora_alpha": job.lora["lora_alpha"],
            "lora_dropout": job.lora["lora_dropout"],
            "vocab_size": hf["vocab_size"],
            "num_layers": hf["num_hidden_layers"],
            "num_heads": hf["num_attention_heads"],
            "num_kv_heads": hf["num_key_value_heads"],
            "embed_dim": hf["hidden_size"],
            "intermediate_dim": hf["intermediate_size"],
            "max_seq_len": 32768,
            "norm_eps": hf["rms_norm_eps"],
            "tie_word_embeddings": hf["tie_word_embeddings"],
        },
        "tokenizer": {"_component_": f"{here}.PadId", "pad_id": hf["pad_token_id"]},
        "checkpointer": {
            "_component_": "torchtune.training.FullModelHFCheckpointer",
            "checkpoint_dir": job.model,
            "checkpoint_files": ["model.safetensors"],
            "output_dir": output,
            "model_type": "QWEN2",
        },
        "resume_from_checkpoint": False,
        "save_adapter_weights_only": True,
        "dataset": {"_component_": f"{here}.rows", "path": job.rows},
        "seed": 0,
        "shuffle": False,
        "epochs": 1,
        "max_steps_per_epoch": None,
        "batch_size": job.micro_batch_size,
        "gradient_accumulation_steps": job.accumulate,
        "optimizer": {
            "_component_": "torch.optim.AdamW",
            "fused": True,
            "weight_decay": WEIGHT_DECAY,
            "lr": LEARNING_RATE,
        },
        "lr_scheduler": {"_component_": f"{here}.constant"},
        "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
        "device": job.device,
        "enable_activation_checkpointing": False,
        "enable_activation_offloading": False,
        "dtype": "bf16",
        "compile": False,
        "metric_logger": {"_component_": f"{here}.Losses"},
        "log_every_n_steps": 1,
    }


def run(job: Job) -> Measured:
    """Train the job."""
    config = OmegaConf.create(settings(job) | job.options)
    # Recipes are next to the package and not part of a package.
    file = Path(torchtune.__file__).parents[1] / "recipes" / "lora_finetune_single_device.py"
    recipe = runpy.run_path(str(file))["LoRAFinetuneRecipeSingleDevice"](config)
    recipe.setup(config)
    recipe.train()
    return MEASURED


if __name__ == "__main__":
    from benchmarks.peers import torchtune_lora  # the module that torchtune imports by name, not __main__

    serve(torchtune_lora.run)
