"""Gradients with recomputed activations, of architectures that change results in place."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from shared_fixtures import make_tokenizer
from torch import Tensor

from benchmarks.tiny_configs import tiny_config
from lit_ft import CausalLM
from lit_ft.packed_batch import pack_samples

LORA = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)


def gradients(folder: str, peft: LoraConfig | None, checkpointing: Any) -> dict[str, Tensor]:
    module = CausalLM(folder, init="random", dtype="float32", peft=peft, gradient_checkpointing=checkpointing)
    module.configure_model()
    module.train()
    torch.manual_seed(1)  # of dropout
    ids = torch.arange(5, 35).numpy()
    module(pack_samples([(ids[:13], ids[:13]), (ids[13:], ids[13:])])).loss_sum.backward()
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("peft", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("architecture", ["gemma3n_text", "git", "roc_bert"])
def test_in_place_changes_of_products_and_embeddings(architecture: str, peft: Any, tmp_path: Path) -> None:
    """Gemma 3n and RoCBert change results of linear layers, GIT that of its embeddings."""
    tiny_config(architecture).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    wanted = gradients(str(tmp_path), peft, False)
    for checkpointing in (True, "selective"):
        found = gradients(str(tmp_path), peft, checkpointing)
        assert found.keys() == wanted.keys()
        largest = max(float(gradient.abs().max()) for gradient in wanted.values())
        for name, gradient in wanted.items():
            assert float((found[name] - gradient).abs().max()) < 1e-5 * largest, name
