"""Virtual tokens in models of which PEFT, or the model itself, asks for more than embeddings."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, PrefixTuningConfig, PromptEncoderConfig, PromptTuningConfig
from transformers import AutoModelForCausalLM

from benchmarks.tiny_configs import tiny_config
from lit_ft import RecipeError
from lit_ft.tuning.wrapping import add_peft

METHODS = [PromptTuningConfig(num_virtual_tokens=3), PromptEncoderConfig(num_virtual_tokens=3, encoder_hidden_size=8)]


def tiny(architecture: str) -> Any:
    return AutoModelForCausalLM.from_config(tiny_config(architecture))


@pytest.mark.parametrize("peft", METHODS, ids=lambda peft: peft.peft_type.value)
@pytest.mark.parametrize("architecture", ["mamba", "dbrx", "mpt"])
def test_a_number_of_heads_that_peft_does_not_find_is_not_needed(architecture: str, peft: Any, tmp_path: Path) -> None:
    model = tiny(architecture)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    wrapped = add_peft(model, peft).eval()
    wrapped.save_pretrained(tmp_path)
    again = tiny(architecture)
    again.load_state_dict(weights)
    read = PeftModel.from_pretrained(again, str(tmp_path)).eval()
    ids = torch.arange(5, 20)[None]
    assert torch.equal(read(input_ids=ids).logits, wrapped(input_ids=ids).logits)


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("qwen3_5_text", r"has layers of other kinds \(linear_attention\)"),
        ("recurrent_gemma", r"has layers of other kinds \(linear_attention\)"),
        ("llama4_text", r"has layers of other kinds \(chunked_attention\)"),
        ("deepseek_v2", r"has keys and values of two sizes \(kv_lora_rank=\d+\)"),
        ("falcon", "keeps them in another form"),
        ("mpt", "names its number of heads in a way that PEFT does not know"),
    ],
)
def test_a_prefix_that_does_not_fit_each_layer_is_refused(architecture: str, reason: str) -> None:
    with pytest.raises(
        RecipeError, match=f"model.peft: virtual tokens of PREFIX_TUNING .*, and {architecture} {reason};"
    ):
        add_peft(tiny(architecture), PrefixTuningConfig(num_virtual_tokens=3))


@pytest.mark.parametrize("architecture", ["gemma3_text", "gpt2"])
def test_a_prefix_fits_layers_of_full_and_sliding_attention(architecture: str) -> None:
    model, ids = tiny(architecture), torch.arange(5, 20)[None]
    before = model.eval()(input_ids=ids).logits
    wrapped = add_peft(model, PrefixTuningConfig(num_virtual_tokens=3)).eval()
    logits = wrapped(input_ids=ids).logits
    assert logits.shape == before.shape
    assert not torch.allclose(logits, before)
    logits.square().sum().backward()
    layers = model.config.num_hidden_layers
    (of_prefix,) = (p.grad for p in wrapped.parameters() if p.requires_grad)  # keys and values of each layer
    assert (of_prefix.view(3, layers, 2, -1).abs().amax((0, 3)) > 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("peft", METHODS, ids=lambda peft: peft.peft_type.value)
@pytest.mark.parametrize("architecture", ["deepseek_v4", "gemma4_text", "qwen4_exp_text"])
def test_models_that_read_ids_again_are_refused(architecture: str, peft: Any) -> None:
    method = peft.peft_type.value
    with pytest.raises(RecipeError, match=f"model.peft: virtual tokens of {method} are .*, and {architecture} reads"):
        add_peft(tiny(architecture), peft)


def test_a_model_in_which_peft_finds_no_embeddings_is_refused() -> None:
    with pytest.raises(
        RecipeError, match="model.peft: PEFT finds no embeddings of vocab_size rows in MoshiForCausalLM"
    ):
        add_peft(tiny("moshi"), METHODS[0])
