"""Which parts of a layer are sharded on their own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import save_model
from lightning.pytorch import Callback, LightningModule, Trainer
from lit_callbacks import AdapterMerger
from peft import LoraConfig
from ranks import on_ranks
from safetensors.torch import load_file
from torch import nn

from lit_ft import CausalLM, RecipeError, TextDataModule
from lit_ft.strategies import FSDPStrategy
from lit_ft.strategies.separate_dtypes import shard_by_dtype
from lit_ft.training.float32.products import kept_modules


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
    shard_by_dtype(module, lambda part, **_: found.append(names[part]))
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


def fit_routers(folder: str, rows: str, out: Path, strategy: str) -> set[torch.dtype]:
    """Dtypes of routers' weights and logits in a fit that trains routers and writes the adapter to ``out``."""
    peft = LoraConfig(r=2, target_modules=["o_proj"], modules_to_save=["gate"], task_type="CAUSAL_LM")
    module = CausalLM(folder, peft=peft, dtype="float32")
    found: set[torch.dtype] = set()

    class Watch(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            for router in kept_modules(pl_module):
                router.register_forward_hook(lambda part, _, result: found.update((part.weight.dtype, result[0].dtype)))

    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        precision="bf16-mixed",
        strategy=FSDPStrategy() if strategy == "fsdp" else strategy,
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        callbacks=[Watch(), AdapterMerger(out)],
    )
    trainer.fit(module, TextDataModule(rows, max_length=96))
    return found


@pytest.mark.processes
def test_routers_stay_in_float32_and_are_saved_whole(tmp_path: Path, write_rows: Any) -> None:
    folder, rows = save_model("deepseek_v3", tmp_path, layers=2), write_rows(count=8)
    assert on_ranks(1, fit_routers, folder, rows, tmp_path / "fsdp", "fsdp", timeout=90) == [{torch.float32}]
    on_ranks(1, fit_routers, folder, rows, tmp_path / "ddp", "ddp", timeout=90)
    files = [load_file(tmp_path / name / "adapter_model.safetensors") for name in ("fsdp", "ddp")]
    assert any(name.endswith("gate.e_score_correction_bias") for name in files[0])
    assert {name: weight.shape for name, weight in files[0].items()} == {n: w.shape for n, w in files[1].items()}
