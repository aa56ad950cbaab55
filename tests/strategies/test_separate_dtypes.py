"""Which parts of a layer are sharded on their own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import save_model
from lightning.pytorch import Trainer
from peft import LoraConfig
from ranks import on_ranks
from torch import nn

from lit_ft import CausalLM, RecipeError, TextDataModule
from lit_ft.strategies import FSDPStrategy
from lit_ft.strategies.separate_dtypes import shard_by_dtype


class Mixer(nn.Module):
    def __init__(self, decay: torch.dtype) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.ones(2, dtype=decay))
        self.projection = nn.Linear(4, 4, dtype=torch.bfloat16)


def layer(decay: torch.dtype = torch.bfloat16, router: torch.dtype = torch.float32) -> nn.ModuleDict:
    parts = {
        "mlp": nn.Linear(4, 8, dtype=torch.bfloat16),
        "router": nn.Linear(4, 2, dtype=router),
        "mixer": Mixer(decay),
        "block": nn.Sequential(nn.Linear(4, 4, dtype=torch.bfloat16), nn.LayerNorm(4, dtype=router)),
    }
    return nn.ModuleDict(parts)


def sharded(module: nn.Module) -> list[str]:
    names = {part: name for name, part in module.named_modules()}
    found: list[str] = []
    shard_by_dtype(module, lambda part: found.append(names[part]))
    return found


def test_parts_of_another_dtype_come_before_the_rest() -> None:
    assert sharded(layer(router=torch.bfloat16)) == [""]
    assert sharded(layer()) == ["router", "block.1", ""]


def test_what_a_part_of_another_dtype_holds_is_sharded_before_it() -> None:
    assert sharded(layer(decay=torch.float32)) == ["router", "mixer.projection", "mixer", "block.1", ""]


def test_frozen_weights_do_not_count() -> None:
    frozen = layer()
    for weight in (*frozen["router"].parameters(), *frozen["block"].parameters()):
        weight.requires_grad_(False)
    assert sharded(frozen) == [""]


def test_two_dtypes_in_one_part_are_refused() -> None:
    mixed = layer()
    mixed["router"].bias = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    with pytest.raises(RecipeError, match=r"router \(Linear\) trains weights of torch.bfloat16, torch.float32, which"):
        sharded(mixed)


def fit_norms_of_queries(folder: str, rows: str, attention: str) -> str:
    peft = LoraConfig(r=2, target_modules=["o_proj"], modules_to_save=["q_norm"], task_type="CAUSAL_LM")
    module = CausalLM(folder, peft=peft, dtype="bfloat16", attn_implementation=attention)
    trainer = Trainer(
        accelerator="cpu", devices=1, strategy=FSDPStrategy(), max_steps=1, logger=False, enable_checkpointing=False
    )
    try:
        trainer.fit(module, TextDataModule(rows, max_length=96))
    except RecipeError as error:
        return str(error)
    return ""


@pytest.mark.processes
def test_parts_of_a_module_that_is_called_once_per_sample_are_refused(tmp_path: Path, write_rows: Any) -> None:
    folder, rows = save_model("qwen3", tmp_path, layers=2), write_rows(count=8)
    [said] = on_ranks(1, fit_norms_of_queries, folder, rows, "sdpa", timeout=90)
    assert "q_norm.modules_to_save.default in Qwen3Attention trains weights of another dtype than the rest" in said
    assert "sample by sample with attn_implementation=sdpa" in said
    assert on_ranks(1, fit_norms_of_queries, folder, rows, "auto", timeout=90) == [""]
