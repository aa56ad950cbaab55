"""Tiny configs of all architectures that transformers has a causal LM for, from the fields of their config classes.

A field's size goes by its name, which most architectures share; layers of all kinds that an architecture has are kept.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

WINDOW = 6
"""Sliding window, which is shorter than some samples of the comparisons."""

_NAMES = {
    512: "vocab_size max_position_embeddings n_positions n_ctx max_seq_len original_max_position_embeddings "
    "context_length unpadded_vocab_size vocab_size_per_layer_input decoder_vocab_size max_target_positions "
    "max_source_positions model_max_length ngram_vocab_size_base position_bias_max_distance pronunciation_vocab_size "
    "shape_vocab_size encoder_hash_byte_group_vocab audio_vocab_size",
    64: "hidden_size d_model n_embd dim emb_dim embedding_dim embedding_size word_embed_proj_dim lru_width "
    "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim moe_intermediate_size shared_expert_intermediate_size "
    "shared_intermediate_size intermediate_size_mlp dense_intermediate_size ffn_hidden_size expert_ffn_hidden_size "
    "dim_ff dff d_inner moe_shared_expert_intermediate_size shared_experts_intermediate_size feed_forward_size "
    "input_embedding_size output_embedding_size out_hidden_size out_dim projection_dim",
    32: "shape_embed_dim pronunciation_embed_dim patch_size",
    24: "qk_head_dim",
    16: "head_dim swa_head_dim kv_channels d_head dim_head attention_head_size qk_nope_head_dim v_head_dim d_rel "
    "linear_key_head_dim linear_value_head_dim linear_head_dim index_head_dim indexer_head_dim mamba_d_state "
    "state_size ssm_state_size mamba_d_head mamba_head_dim mamba_headdim time_step_rank mamba_dt_rank kv_lora_rank "
    "q_lora_rank o_lora_rank laurel_rank hidden_size_per_layer_input gated_norm_rank hc_lowrank ple_embed_dim "
    "router_hidden_size adapter_rank indexer_budget",
    8: "qk_rope_head_dim rotary_dim mamba_chunk_size chunk_size block_size index_topk query_pre_attn_scalar rel_extent "
    "split_ngram_parts mamba_n_heads mamba_num_heads n_mamba_heads dim_model_base",
    4: "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_decoder_layers "
    "num_encoder_layers num_blocks num_attention_heads n_head n_heads attention_heads decoder_attention_heads "
    "encoder_attention_heads num_decoder_attention_heads num_encoder_attention_heads swa_num_attention_heads num_heads "
    "linear_num_key_heads linear_num_value_heads linear_num_heads index_n_heads indexer_n_heads num_experts "
    "n_routed_experts num_local_experts moe_num_experts depth indexer_compress_ratio",
    2: "num_key_value_heads num_kv_heads swa_num_key_value_heads num_experts_per_tok num_experts_per_token moe_topk "
    "moe_k global_attn_every_n_layers indexer_kv_heads sliding_window_pattern",
    1: "n_group topk_group num_expert_group n_shared_experts num_shared_experts moe_num_shared_experts mamba_n_groups "
    "n_groups mamba_ngroups first_k_dense_replace num_dense_layers",
    WINDOW: "sliding_window attention_window_size local_attention window_size sliding_window_size keep_window_size",
}
SIZES = {name: size for size, names in _NAMES.items() for name in names.split()}
"""Size of a field by its name."""
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def tiny_config(model_type: str, **values: object) -> PretrainedConfig:
    """Config of an architecture with four layers, 64 hidden units and 512 tokens.

    Args:
        model_type: transformers' name of the architecture.
        values: fields that are given another value.
    """
    return CONFIG_MAPPING[model_type](**tiny_values(model_type, **values))


def tiny_values(model_type: str, **values: object) -> dict[str, Any]:
    """Fields of a tiny config."""
    kind = CONFIG_MAPPING[model_type]
    return {**_sizes(kind), **OVERRIDES.get(model_type, {}), **values}


def _sizes(kind: type[PretrainedConfig]) -> dict[str, Any]:
    types = {field.name: str(field.type) for field in fields(kind)}
    values: dict[str, Any] = {name: size for name, size in SIZES.items() if name in types and "list" not in types[name]}
    drops = ("dropout", "pdrop", "dropout_prob", "layerdrop", "dropout_rate")
    values |= {name: 0 if types[name] == "<class 'int'>" else 0.0 for name in types if name.endswith(drops)}
    values |= {name: None if "None" in types[name] else 3 for name in _TOKENS if name in types}
    if "qk_rope_head_dim" in types:  # multi-head latent attention: all heads have keys, of which a part is rotated
        values |= {"head_dim": SIZES["qk_rope_head_dim"], "num_key_value_heads": SIZES["num_attention_heads"]}
    parts = {name: part for name, part in kind.sub_configs.items() if part is not AutoConfig}
    return values | {name: _sizes(part) | dict(OVERRIDES.get(part.model_type, {})) for name, part in parts.items()}


_MAMBA: dict[str, Any] = {"mamba_d_head": 16, "mamba_n_heads": 8}
_IS_DECODER: dict[str, Any] = {"is_decoder": True}
_ROTARY: dict[str, Any] = {"rotary_dim": 8}
_SIX_LAYERS: dict[str, Any] = {"num_hidden_layers": 6}

OVERRIDES: Mapping[str, Mapping[str, Any]] = {
    **dict.fromkeys(
        "bert bert-generation big_bird electra ernie megatron-bert rembert roc_bert roformer".split(),
        _IS_DECODER,
    ),
    **dict.fromkeys(
        "bailing_hybrid gemma3_text inkling_text inkling2_text jamba kimi_linear kolibri1 lfm3".split(), _SIX_LAYERS
    ),
    "bamba": {**_MAMBA, "attn_layer_indices": [1, 3]},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 128},
    "granitemoehybrid": {**_MAMBA, "layer_types": ["linear_attention", "full_attention"] * 2},
    "inkling2_loop_text": {
        "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid"],
        "n_layers_per_attn_res_block": 1,
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 3,
        "loop_num_passes": 2,
    },
    "mamba2": {"num_heads": 8},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 64},
    },
    "dots3_note_text": {
        "n_group": 2,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_head_dim": 24,
        **dict.fromkeys(["swa_q_lora_rank", "swa_kv_lora_rank", "swa_qk_nope_head_dim", "swa_v_head_dim"], 16),
    },
    "dots3_note_vision_encoder": {
        "mlp_layer_types": ["dense", "sparse"] * 2,
        "adapter_in_dim": 64,
        "adapter_out_dim": 64,
    },
    "dots3_note_audio_encoder": {"adapter_input_size": 64, "adapter_out_dim": 64},
    "gemma3n_text": {**_SIX_LAYERS, "num_kv_shared_layers": 0, "laurel_rank": 8, "intermediate_size": 64},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "mpt": {"attn_config": {}},
    "qwen4_exp_text": {"indexer_kv_heads": 1, "ple_layer_ids": [2], "eos_token_id": 3},
    "zamba2": {
        "num_hidden_layers": 6,
        "layers_block_type": ["linear_attention", "linear_attention", "hybrid"] * 2,
        "hybrid_layer_ids": [2, 5],
        "n_mamba_heads": 8,
    },
    "zamba": {"num_hidden_layers": 8},
    "gemma4_text": {"hidden_size_per_layer_input": 16, "pad_token_id": 0},
    "gemma4_unified_text": {"pad_token_id": 0},
    **dict.fromkeys(["codegen", "gptj"], _ROTARY),
    "fuyu": {"text_config": {"model_type": "persimmon", **_sizes(CONFIG_MAPPING["persimmon"])}, "patch_size": 2},
    "gemma3": {"vision_config": {"model_type": "siglip_vision_model", **_sizes(CONFIG_MAPPING["siglip_vision_model"])}},
    "got_ocr2": {"text_config": {"model_type": "qwen2", **_sizes(CONFIG_MAPPING["qwen2"])}},
    "moss_transcribe_diarize": {"text_config": {"model_type": "qwen3", **_sizes(CONFIG_MAPPING["qwen3"])}},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "xlstm": {"chunk_size": 64},
    "zaya": {"num_experts_per_tok": 1},
}
"""Fields of the architectures whose sizes or layers depend on each other in ways of their own."""
