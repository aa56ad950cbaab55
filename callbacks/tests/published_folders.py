"""Tiny model folders in the form that models are published in: with vision towers, ``mtp.*`` heads and shards."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Llama4Config,
    Llama4ForConditionalGeneration,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3NextForCausalLM,
)

TEXT: dict[str, Any] = {
    "vocab_size": 384,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}
HYBRID: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


def qwen3_5() -> PreTrainedModel:
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32}
    config = Qwen3_5Config(
        text_config={**TEXT, **HYBRID, "tie_word_embeddings": True},
        vision_config={**vision, "patch_size": 4, "num_position_embeddings": 16},
        tie_word_embeddings=True,
    )
    return Qwen3_5ForConditionalGeneration(config)


def gemma3() -> PreTrainedModel:
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(
        text_config={**TEXT, "query_pre_attn_scalar": 8, "sliding_window": 16},
        vision_config={**vision, "image_size": 8, "patch_size": 4},
        mm_tokens_per_image=1,
    )
    return Gemma3ForConditionalGeneration(config)


def llama4() -> PreTrainedModel:
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    widths = {"vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16}
    experts = {"intermediate_size_mlp": 48, "num_local_experts": 2}
    config = Llama4Config(
        text_config={**TEXT, **experts, "no_rope_layers": [1, 0], "attention_chunk_size": 16, "floor_scale": 8},
        vision_config={**vision, **widths, "image_size": 8, "patch_size": 4},
    )
    return Llama4ForConditionalGeneration(config)


def qwen3_next() -> PreTrainedModel:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = AutoConfig.for_model(
        "qwen3_next", **TEXT, **HYBRID, **experts, shared_expert_intermediate_size=16, tie_word_embeddings=False
    )
    return Qwen3NextForCausalLM(config)


BUILDERS = {"qwen3_5": qwen3_5, "gemma3": gemma3, "llama4": llama4, "qwen3_next": qwen3_next}


def publish(name: str, folder: Path, tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype = torch.float32) -> Path:
    """Write a model as it is published: three shards, ``mtp.*`` in other dtypes, processors, a license."""
    torch.manual_seed(0)
    model = BUILDERS[name]().to(dtype)
    for config in (model.config, model.config.get_text_config(), model.generation_config):
        config.pad_token_id, config.bos_token_id = tokenizer.pad_token_id, None
        config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors") | {
        "mtp.fc.weight": torch.randn(32, 64),
        "mtp.layers.0.input_layernorm.weight": torch.full((32,), float("nan"), dtype=torch.bfloat16),
        "mtp.counts": torch.arange(5, dtype=torch.int8),
    }
    _shard(tensors, folder, 3)
    config = json.loads((folder / "config.json").read_text())
    config["torch_dtype"] = config.pop("dtype")  # as transformers 4 wrote it
    (folder / "config.json").write_text(json.dumps({"a_key_of_its_own": [1, 2], **config}, indent=4))
    (folder / "generation_config.json").write_text(json.dumps(_generation(folder), indent=4))
    (folder / "preprocessor_config.json").write_text('{"image_processor_type": "Own",  "size": 8}')
    (folder / "video_preprocessor_config.json").write_text("{}")
    (folder / "LICENSE").write_text("as is")
    return folder


def _generation(folder: Path) -> dict[str, Any]:
    return {"temperature": 0.6, "do_sample": True, **json.loads((folder / "generation_config.json").read_text())}


def _shard(tensors: dict[str, torch.Tensor], folder: Path, count: int) -> None:
    (folder / "model.safetensors").unlink()
    names, where = sorted(tensors), {}
    for place in range(count):
        own, file = names[place::count], f"model-{place + 1:05}-of-{count:05}.safetensors"
        save_file({name: tensors[name] for name in own}, folder / file, {"format": "pt"})
        where |= dict.fromkeys(own, file)
    index = {"metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Tensors of all weight files of a folder, by their names there."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
