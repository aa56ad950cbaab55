"""Where the weights of an adapter are made. What tuning methods compute: test_tuning.py."""

import re
from typing import Any

import pytest
import torch
from peft import GraloraConfig, LNTuningConfig, LoHaConfig, LoraConfig, OFTConfig, OSFConfig, PeftConfig, VeraConfig
from transformers import AutoModelForCausalLM
from tuning_methods import METHODS, PARAMETERS, TOKENS

from benchmarks.tiny_configs import tiny_config
from lit_ft import RecipeError
from lit_ft.checkpointing.storage.checkpoint_io import trainable_shapes
from lit_ft.tuning.lora_init import needs_init
from lit_ft.tuning.spec import TuningSpec
from lit_ft.tuning.wrapping import add_peft, takes_shapes_from_weights


@pytest.mark.slow
@pytest.mark.parametrize("method", ["LoRA", "VeRA", "PVeRA", "RandLoRA", "FourierFT", "WaveFT", "SHiRA", "TinyLoRA"])
def test_new_weights_are_those_of_the_cpu_under_each_default_device(model_folder: str, method: str) -> None:
    """Lightning makes its GPU the default device, for which the CPU generators of these methods are not."""

    def weights(default: str) -> dict[str, torch.Tensor]:
        base = AutoModelForCausalLM.from_pretrained(model_folder)
        torch.manual_seed(3)
        with torch.device(default):
            wrapped = add_peft(base, METHODS[method])
        return {**dict(wrapped.named_parameters()), **dict(wrapped.named_buffers())}

    expected, found = weights("cpu"), weights("meta")
    assert found.keys() == expected.keys()
    for name, weight in found.items():
        assert weight.device.type == "cpu", name
        assert torch.equal(weight, expected[name]), name


ALL = {**METHODS, **PARAMETERS, **TOKENS}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", [m for m, c in ALL.items() if not (needs_init(c) or takes_shapes_from_weights(c))])
def test_a_model_without_weights_trains_what_one_with_weights_trains(
    model_folder: str, method: str, dtype: torch.dtype
) -> None:
    """By the former a checkpoint is refused before weights are read."""
    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=dtype)
    skeleton = AutoModelForCausalLM.from_pretrained(model_folder, dtype=dtype).to("meta")
    without = TuningSpec(ALL[method], "float32", None).wrap_skeleton(skeleton, [], None)
    assert trainable_shapes(without) == trainable_shapes(add_peft(base, ALL[method]))


@pytest.mark.parametrize(("dtype", "device"), [(torch.bfloat16, "cpu"), (torch.float32, "meta")])
def test_adalora_trains_no_counts_in_another_dtype_or_without_weights(
    model_folder: str, dtype: torch.dtype, device: str
) -> None:
    """PEFT makes new parameters of them, which train, as it moves them to the dtype and device of the base."""
    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=dtype).to(device)
    wrapped = add_peft(base, METHODS["AdaLoRA"])
    trained = {name.split(".")[-2] for name, weight in wrapped.named_parameters() if weight.requires_grad}
    assert trained == {"lora_A", "lora_B", "lora_E"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"layers_to_transform": [0, 9]},
            "layers_to_transform=[0, 9] has [9], which Qwen2ForCausalLM lacks; its",
        ),
        (
            {"layers_to_transform": 9},
            "layers_to_transform=9 has [9], which Qwen2ForCausalLM lacks; its layers",
        ),
        ({"inference_mode": True}, "inference_mode=true, as saved adapters have it, trains nothing; leave it out"),
    ],
)
def test_what_peft_passes_over_is_refused(model_folder: str, options: dict[str, Any], message: str) -> None:
    base = AutoModelForCausalLM.from_pretrained(model_folder)
    with pytest.raises(RecipeError, match=re.escape(f"model.peft: {message}")):
        add_peft(base, LoraConfig(target_modules=["q_proj"], **options))


@pytest.mark.parametrize("targets", ["all-linear", r".*\.q_proj"])
@pytest.mark.parametrize("config", [OFTConfig, VeraConfig, LoHaConfig])
def test_numbers_of_layers_hold_for_names_alone(model_folder: str, config: type[PeftConfig], targets: str) -> None:
    base = AutoModelForCausalLM.from_pretrained(model_folder)
    with pytest.raises(
        RecipeError, match=r"layers_to_transform=\[1\] does not limit target_modules=.*; give a list of"
    ):
        add_peft(base, config(target_modules=targets, layers_to_transform=[1]))
    wrapped = add_peft(base, config(target_modules=["q_proj", "k_proj"], layers_to_transform=[1]))
    trained = [name for name, parameter in wrapped.named_parameters() if parameter.requires_grad and "layers" in name]
    assert all("layers.1." in name for name in trained), trained


@pytest.mark.parametrize("targets", [["q_proj", "down_proj"], r".*\.(q|down)_proj"])
def test_targets_that_train_in_full_are_named(model_folder: str, targets: list[str] | str) -> None:
    base = AutoModelForCausalLM.from_pretrained(model_folder)
    with pytest.warns(UserWarning, match="both name down_proj: trained in full, without an adapter"):
        wrapped = add_peft(base, LoraConfig(target_modules=targets, modules_to_save=["mlp"]))
    assert not [name for name, _ in wrapped.named_parameters() if "mlp" in name and "lora" in name]


@pytest.mark.parametrize("rows", [[3, -1], {"embed_tokens": [-1]}])
def test_a_negative_token_id_is_refused(model_folder: str, rows: list[int] | dict[str, list[int]]) -> None:
    base = AutoModelForCausalLM.from_pretrained(model_folder)
    with pytest.raises(RecipeError, match="^model.peft: trainable_token_indices has -1; token ids are 0 or more"):
        add_peft(base, LoraConfig(target_modules=["q_proj"], trainable_token_indices=rows))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("glm", "does not rotate all of each query"),
        ("gpt_oss", "does not rotate all of each query"),
        ("mimo_v2_flash", "does not rotate all of each query"),
        ("granitemoehybrid", "does not rotate all of each query"),  # nor any of it
        ("phi4_multimodal", "is not built like Llama's"),  # that of its encoders is
    ],
)
def test_llama_adapter_is_refused_where_attention_is_not_llamas(name: str, why: str) -> None:
    model = AutoModelForCausalLM.from_config(tiny_config(name))
    with pytest.raises(RecipeError, match=f"LLaMA-Adapter does not fit {type(model).__name__}: its .*{why}"):
        add_peft(model, METHODS["LLaMA-Adapter"])


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", ["mistral", "cohere_compass_text", "qwen2"])
def test_llama_adapter_fits_other_attention_like_llamas(name: str, device: str) -> None:
    dynamic = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}} if name == "qwen2" else {}
    model = AutoModelForCausalLM.from_config(tiny_config(name, **dynamic)).to(device)
    assert add_peft(model, METHODS["LLaMA-Adapter"])


@pytest.mark.parametrize("peft", [OFTConfig(oft_block_size=4), GraloraConfig(r=4)], ids=["OFT", "GraLoRA"])
def test_inputs_of_four_dimensions_are_vectors(peft: PeftConfig) -> None:
    """As latent attention multiplies; OFT takes these for images, and GraLoRA fails."""
    base = AutoModelForCausalLM.from_config(tiny_config("deepseek_v3")).eval()
    peft.target_modules = ["q_b_proj", "kv_b_proj", "o_proj"]
    wrapped = add_peft(base, peft).eval()
    for parameter in filter(lambda p: p.requires_grad, wrapped.parameters()):
        torch.nn.init.normal_(parameter, std=0.1)
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        adapted = wrapped(input_ids=ids).logits
        with wrapped.disable_adapter():
            assert (wrapped(input_ids=ids).logits - adapted).abs().max() > 1e-2
        merged = wrapped.merge_and_unload()(input_ids=ids).logits
    torch.testing.assert_close(adapted, merged, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("targets", ["all-linear", ["lm_head", "c_fc"]])
def test_a_target_that_peft_passes_over_is_refused(targets: Any) -> None:
    base = AutoModelForCausalLM.from_config(tiny_config("gpt2"))
    with pytest.raises(RecipeError, match=r"OSF does not train transformer\.h\.0\S+ \(Conv1D\) of GPT2LMHeadModel"):
        add_peft(base, OSFConfig(target_modules=targets))


@pytest.mark.parametrize("targets", [["input_layernorm"], r".*\.input_layernorm"])
def test_a_norm_without_weights_is_refused(targets: Any) -> None:
    base = AutoModelForCausalLM.from_config(tiny_config("olmo"))
    with pytest.raises(RecipeError, match=r"input_layernorm of OlmoForCausalLM \(OlmoLayerNorm\) has no weights to tr"):
        add_peft(base, LNTuningConfig(target_modules=targets))
