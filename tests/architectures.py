"""Tiny models with random weights, one per architecture of the parallelism tests."""

from pathlib import Path
from typing import Any

import torch
from shared_fixtures import make_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

COMMON: dict[str, Any] = {
    "vocab_size": 384,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "dtype": "float32",
}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
}
"""Sizes of multi-head latent attention."""
WINDOW = {"head_dim": 12, "sliding_window": 16}
OWN: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"head_dim": 12, "sliding_window": 16},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 12},
    "gemma2": {**WINDOW, "query_pre_attn_scalar": 12},
    "gemma3_text": {**WINDOW, "query_pre_attn_scalar": 12},
    "granite": {
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.3,
    },
    "phi3": {"original_max_position_embeddings": 512},
    "cohere": {"logit_scale": 0.5},
    "olmo2": {},
    "gpt_oss": {**WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 12},
    "qwen3_moe": {"head_dim": 12, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "gpt_neox": {},
}
CHUNKED: dict[str, dict[str, Any]] = {
    "llama4_text": {
        "head_dim": 12,
        "num_local_experts": 2,
        "intermediate_size_mlp": 96,
        "no_rope_layers": [1, 1, 1, 0],
        "attention_chunk_size": 16,
        "floor_scale": 4,
    },
}
"""Models with layers that attend within chunks; the last of four layers scales attention by a token's position."""
EXPERTS = ("gpt_oss", "mixtral", "qwen3_moe", "deepseek_v3")
MORE_EXPERTS: dict[str, dict[str, Any]] = {
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {  # a dense layer, then three with experts and a shared expert
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 2,
        **LATENT,
    },
}
"""Mixture-of-experts models that only the tests of experts build."""
OTHER_MIXERS: dict[str, dict[str, Any]] = {
    "nemotron_h": {
        "head_dim": 12,
        "mamba_num_heads": 8,
        "mamba_head_dim": 12,
        "ssm_state_size": 16,
        "n_groups": 2,
        "chunk_size": 16,
        "n_routed_experts": 4,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
    },
    "qwen3_5_text": {
        "head_dim": 12,
        "full_attention_interval": 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "minicpm3": LATENT,
}
"""Models in which some layers have Mamba, a gated delta net or multi-head latent attention."""
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
"""Target modules of adapters that leave out the experts."""


def save_model(architecture: str, folder: Path, layers: int = 4) -> str:
    tokenizer = make_tokenizer()
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    own = {**OWN, **CHUNKED, **MORE_EXPERTS, **OTHER_MIXERS}[architecture]
    config = AutoConfig.for_model(architecture, **{**COMMON, "num_hidden_layers": layers, **ids, **own})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.1 * torch.randn(parameter.shape)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
