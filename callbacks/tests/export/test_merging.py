"""A merged model on disk."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lit_callbacks.export.merge_check import MergeFailed
from lit_callbacks.export.merging import save_adapter, save_merged
from lit_callbacks.internals.bitsandbytes_internals import without_faults
from safetensors.torch import load_file

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


@pytest.mark.parametrize(("dtype", "kept"), [(torch.float16, torch.float32), (torch.bfloat16, torch.bfloat16)])
def test_weights_that_transformers_keeps_in_fp32_beside_fp16(
    tmp_path: Path, dtype: torch.dtype, kept: torch.dtype
) -> None:
    """The norms of gpt-oss: a value of 1e-9 is zero in fp16."""
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size": 32}
    model = transformers.GptOssForCausalLM(
        transformers.GptOssConfig(vocab_size=64, head_dim=16, pad_token_id=0, **SIZES, **experts)
    )
    norm = "model.layers.0.input_layernorm.weight"
    model.get_parameter(norm).data[0] = 1e-9
    trained = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    save_merged(trained, tmp_path / "merged", dtype=dtype)
    weights = load_file(tmp_path / "merged" / "model.safetensors")
    assert weights["model.embed_tokens.weight"].dtype == dtype
    assert weights[norm].dtype == kept
    assert float(weights[norm][0]) == pytest.approx(1e-9, rel=1e-2)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert again.get_parameter(norm)[0] == weights[norm][0]


def test_names_of_modules_are_in_order_in_an_adapter(tmp_path: Path) -> None:
    """PEFT writes its sets in an order that Python draws for each process."""
    names = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(vocab_size=64, intermediate_size=32, **SIZES))
    trained = peft.get_peft_model(model, peft.LoraConfig(target_modules=names, exclude_modules=["o", "a", "b"]))
    save_adapter(trained, tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["target_modules"] == names
    assert config["exclude_modules"] == ["a", "b", "o"]
    assert peft.PeftConfig.from_pretrained(tmp_path / "adapter").target_modules == set(names)


def test_gemma_in_a_wider_dtype(tmp_path: Path) -> None:
    """Its embeddings are multiplied by the root of the width, in bfloat16 by 6.3125, not 6.3246."""
    sizes = SIZES | {"hidden_size": 40, "initializer_range": 0.2}
    config = transformers.Gemma3TextConfig(vocab_size=64, head_dim=16, intermediate_size=32, **sizes)
    transformers.Gemma3ForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "base")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    trained = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    save_merged(trained, tmp_path / "merged", dtype=torch.float32)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.dtype == torch.float32
    assert base.dtype == torch.bfloat16


def test_a_model_that_takes_no_name_of_a_dtype(tmp_path: Path) -> None:
    """Apertus, to whose config ``save_pretrained`` gives the name of the dtype."""
    config = transformers.ApertusConfig(vocab_size=64, **SIZES, intermediate_size=32, pad_token_id=0)
    transformers.ApertusForCausalLM(config).save_pretrained(tmp_path / "base")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model.lm_head.weight.data += 1.0
    save_merged(model, tmp_path / "merged")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.equal(merged.lm_head.weight, model.lm_head.weight)


def test_an_adapter_is_merged_into_a_quantized_gpt2(tmp_path: Path) -> None:
    """The weights of its layers are transposed in files, and were not after transformers had dequantized them."""
    pytest.importorskip("bitsandbytes")
    config = transformers.GPT2Config(vocab_size=64, n_positions=32, n_embd=64, n_layer=1, n_head=2)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "base")
    in_4_bits = transformers.BitsAndBytesConfig(load_in_4bit=True)
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", quantization_config=in_4_bits)
    without_faults(base)
    model = peft.get_peft_model(
        base, peft.LoraConfig(target_modules=["c_attn", "c_fc"], init_lora_weights=False)
    ).eval()
    save_merged(model, tmp_path / "merged", quantized_base="dequantize")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    ids = torch.arange(6)[None]
    torch.testing.assert_close(merged(ids).logits, model(ids).logits, atol=1e-4, rtol=1e-4)


def test_quantized_weights_that_transformers_does_not_read_back_are_refused_with_a_way_out(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    sizes = {**SIZES, "hidden_size": 64, "intermediate_size": 64, "intermediate_size_mlp": 64, "head_dim": 16}
    config = transformers.Llama4TextConfig(vocab_size=64, **sizes, num_local_experts=2, pad_token_id=0)
    transformers.Llama4ForCausalLM(config).save_pretrained(tmp_path / "base")
    in_4_bits = transformers.BitsAndBytesConfig(load_in_4bit=True)
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", quantization_config=in_4_bits)
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)).eval()
    with pytest.raises(MergeFailed, match="do not load: .* nothing was written. Dequantize the base, or use the adap"):
        save_merged(model, tmp_path / "merged", quantized_base="keep")
    assert not (tmp_path / "merged").exists()


def test_a_model_that_keeps_the_states_of_its_last_pass_is_merged(tmp_path: Path) -> None:
    """They belong to a graph, which cannot be copied."""
    config = transformers.RecurrentGemmaConfig(
        vocab_size=64, **{**SIZES, "num_hidden_layers": 3}, lru_width=32, intermediate_size=32, pad_token_id=0
    )
    base = transformers.RecurrentGemmaForCausalLM(config)
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)).train()
    model(torch.arange(6)[None], use_cache=False).logits.sum().backward()
    save_merged(model, tmp_path / "merged")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert not torch.equal(
        merged.model.layers[2].temporal_block.q_proj.weight,
        base.model.layers[2].temporal_block.q_proj.base_layer.weight,
    )
