"""Inits of LoRA that change the base."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from benchmarks.tiny_configs import tiny_config
from lit_ft.tuning.lora_init import run_lora_init
from lit_ft.tuning.spec import TuningSpec


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4"])
def test_weights_of_the_base_are_not_copied(init: str) -> None:
    model = AutoModelForCausalLM.from_config(tiny_config("qwen2"), dtype=torch.float32)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    before = {name: (layer.weight.data_ptr(), layer.weight.detach().clone()) for name, layer in layers.items()}
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=init)
    _, start = run_lora_init(model, config, lambda chosen: get_peft_model(model, chosen), [], print, lambda: model)
    for name, (place, weight) in before.items():
        assert layers[name].weight.data_ptr() == place
        assert torch.equal(layers[name].weight, weight) == ("q_proj" not in name)
    assert len(start["taken"]) == 2 * sum("q_proj" in name for name in layers)


@pytest.mark.parametrize("init", ["eva", "corda", "lora_ga"])
def test_an_init_without_settings_has_the_default_ones(init: str) -> None:
    """As a recipe gives it, where LoftQ's settings are there at their defaults."""
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=init, loftq_config={"loftq_bits": 4})
    settings = [config.eva_config, config.corda_config, config.lora_ga_config]
    assert settings == [None] * 3
    TuningSpec.of(config, "float32", None, None)
    settings = [config.eva_config, config.corda_config, config.lora_ga_config]
    assert [one is not None for one in settings] == [name == init for name in ("eva", "corda", "lora_ga")]
