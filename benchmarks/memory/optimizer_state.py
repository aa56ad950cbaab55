"""Bytes of optimizer state per trainable parameter, for each fragment of recipes/optimizers.

    python -m benchmarks.memory.optimizer_state

Measured on one decoder layer of Qwen2.5-0.5B in float32 with random weights, after one step on random gradients: all
its weights, and a LoRA adapter of rank 16 on its linear layers.
"""

from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import OptimizerCallable
from lit_callbacks.memory.storage_ledger import local_bytes, tensors_in
from peft import LoraConfig, inject_adapter_in_model
from torch.optim import Optimizer
from transformers import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

from benchmarks.compare import environment
from lit_ft.recipe.parser import RecipeParser
from lit_ft.training.optimizers.configure import configure_optimizers

FRAGMENTS = Path(__file__).parents[2] / "recipes" / "optimizers"
LAYER = Qwen2Config(hidden_size=896, intermediate_size=4864, num_attention_heads=14, num_key_value_heads=2)
"""Decoder layer of Qwen2.5-0.5B."""


def read_optimizer(path: Path, **options: Any) -> OptimizerCallable:
    """Factory of a fragment's optimizer.

    Args:
        path: path of the fragment.
        options: arguments that replace the fragment's.
    """
    optimizer = yaml.safe_load(path.read_text(encoding="utf-8"))["optimizer"]
    optimizer["init_args"] = optimizer.get("init_args", {}) | options
    parser = RecipeParser()
    parser.add_argument("--optimizer", type=OptimizerCallable)
    return parser.instantiate(parser.parse_object({"optimizer": optimizer})).optimizer


def state_bytes(optimizer: Optimizer) -> int:
    """Bytes of an optimizer's state; a tensor that several parameters share counts once."""
    return local_bytes(tensors_in(optimizer.state_dict()))


@cache
def layer_with_gradients(lora: bool) -> LightningModule:
    """The decoder layer, or a LoRA adapter on it, with random gradients; all optimizers step it."""
    torch.manual_seed(0)
    module = LightningModule()
    layer: Any = Qwen2DecoderLayer(LAYER, 0)
    linear = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    module.layer = inject_adapter_in_model(LoraConfig(r=16, target_modules=linear), layer) if lora else layer
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn_like(parameter)
    return module


def bytes_per_weight(make_optimizer: OptimizerCallable, lora: bool) -> float:
    """Bytes of state per trainable parameter: of the full layer, or of a LoRA adapter on it."""
    module = layer_with_gradients(lora)
    optimizer: Any = configure_optimizers(module, make_optimizer)
    if hasattr(optimizer, "train"):
        optimizer.train()
    for group in optimizer.param_groups:
        if "ns_steps" in group:
            group["ns_steps"] = 1  # Muon's state does not depend on it, and bfloat16 products are slow on many CPUs
    optimizer.step()
    return state_bytes(optimizer) / sum(p.numel() for p in module.parameters() if p.requires_grad)


def main() -> None:
    """Print the table."""
    print("| fragment | all weights | LoRA, r = 16 |\n|---|---|---|")
    for path in sorted(FRAGMENTS.glob("*.yaml")):
        full, lora = (bytes_per_weight(read_optimizer(path), lora) for lora in (False, True))
        print(f"| `{path.name}` | {full:.2f} | {lora:.2f} |")
    print(f"\n{environment()}")


if __name__ == "__main__":
    main()
