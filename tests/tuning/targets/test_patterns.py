"""Ranks and alphas of layers that are given to PEFT as parameters."""

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import AutoModelForCausalLM

from benchmarks.tiny_configs import tiny_config
from lit_ft import CausalLM

PATTERN = r"The following rank_pattern|match no layer that is adapted"


def skeleton(folder: str, **options: Any) -> PeftModel:
    model = CausalLM(folder, peft=LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", **options)).check()
    assert isinstance(model, PeftModel)
    return model


def ranks_and_alphas(model: nn.Module) -> dict[str, tuple[int, int]]:
    layers = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    return {name: (layer.r["default"], layer.lora_alpha["default"]) for name, layer in layers.items()}


def test_patterns_reach_layers_that_are_given_as_parameters(folder_of: Callable[[str], str], tmp_path: Path) -> None:
    """Dense layers and shared experts; plain PEFT reads the same from the adapter's config."""
    options = {"rank_pattern": {"gate_proj": 2, "0.mlp.up_proj": 3, "o_proj": 5}, "alpha_pattern": {"down_proj": 6}}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", PATTERN)
        model = skeleton(folder_of("deepseek_v3"), **options)
    found = ranks_and_alphas(model)
    by_name = {"gate_proj": (2, 8), "o_proj": (5, 8), "down_proj": (4, 6), "layers.0.mlp.up_proj": (3, 8)}
    for name, values in found.items():
        assert values == next((v for end, v in by_name.items() if name.endswith(end)), (4, 8)), name
    assert {values for name, values in found.items() if "shared_experts" in name} == {(2, 8), (4, 8), (4, 6)}
    model.active_peft_config.save_pretrained(str(tmp_path))
    plain = AutoModelForCausalLM.from_config(tiny_config("deepseek_v3"))
    assert ranks_and_alphas(get_peft_model(plain, LoraConfig.from_pretrained(str(tmp_path)))) == found


def test_patterns_that_match_nothing_are_named(folder_of: Callable[[str], str]) -> None:
    with pytest.warns(UserWarning, match=re.escape("rank_pattern ['gate_prj'] match no layer that is adapted")):
        skeleton(folder_of("deepseek_v3"), rank_pattern={"gate_prj": 2, "up_proj": 3})
