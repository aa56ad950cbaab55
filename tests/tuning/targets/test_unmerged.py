"""Layers into which PEFT cannot merge what was trained."""

import pytest
from peft import BeftConfig, LNTuningConfig, LoraConfig, PeftConfig
from transformers import AutoModelForCausalLM

from benchmarks.tiny_configs import tiny_config
from lit_ft import RecipeError
from lit_ft.tuning.targets.unmerged import check_merged
from lit_ft.tuning.wrapping import add_peft


@pytest.mark.parametrize(
    ("architecture", "peft", "message"),
    [
        ("llama", BeftConfig(target_modules=["o_proj"]), "BEFT trains biases, and model.layers.0.self_attn.o_proj has"),
        ("llama", LoraConfig(lora_bias=True, target_modules=["o_proj"]), "lora_bias=true trains biases, and model.lay"),
        (
            "axk2",
            LNTuningConfig(target_modules=["input_layernorm"]),
            "PEFT merges norms with a weight of their own, and model.layers.0.input_layernorm is none",
        ),
        ("llama", LNTuningConfig(target_modules=["input_layernorm"]), None),
        ("qwen2", BeftConfig(target_modules=["q_proj"]), None),
    ],
)
def test_what_cannot_be_merged_is_refused(architecture: str, peft: PeftConfig, message: str | None) -> None:
    model = add_peft(AutoModelForCausalLM.from_config(tiny_config(architecture)), peft)
    if message is None:
        check_merged(model)
        model.merge_and_unload()
        return
    with pytest.raises(RecipeError, match=f"merge=true: {message}.*; leave merge out"):
        check_merged(model)
