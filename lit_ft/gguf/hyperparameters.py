"""Hyperparameters of a GGUF file, from the config of a model."""

from collections.abc import Mapping
from typing import Any

import gguf
import torch
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from lit_ft.model.architecture import Architecture
from lit_ft.model.config.positions import positions_in

FULL, SLIDING = "full_attention", "sliding_attention"
PROPORTIONAL = "proportional"
"""Rotary position embeddings of Gemma 4: pairs lie as if all were rotated, and the last ones are not."""
_NOT_ROTATED = 1e30
"""Divisor of a frequency that leaves a pair as it is, in float32 (llama.cpp's converter)."""


def rope_of(config: PretrainedConfig) -> list[dict[str, Any]]:
    """Parameters of rotary position embeddings: of full attention and, where they differ, of sliding windows."""
    rope = config.rope_parameters
    return [rope[kind] for kind in (FULL, SLIDING) if kind in rope] or [rope]


def context_length(config: PretrainedConfig, has_windows: bool) -> int:
    """Positions up to which llama.cpp computes what transformers does.

    Args:
        config: config of the model.
        has_windows: whether llama.cpp computes sliding windows of such a model; otherwise they are a limit.
    """
    positions = positions_in(config)
    assert positions is not None  # all families that are written state it
    window = None if has_windows else getattr(config, "sliding_window", None)
    return min(positions, window) if window else positions


def full_attention_interval(config: PretrainedConfig) -> int | None:
    """Layers from one with full attention to the next one, counted from the first; None where it is not constant."""
    full = [number for number, kind in enumerate(config.layer_types, 1) if kind == FULL]
    interval = full[0] if full else len(config.layer_types) + 1
    return interval if full == list(range(interval, len(config.layer_types) + 1, interval)) else None


def write_hyperparameters(writer: gguf.GGUFWriter, config: PretrainedConfig, has_windows: bool) -> None:
    """Write the sizes of a model, its rotary position embeddings and its norms.

    Args:
        writer: writer of the file.
        config: config of the model.
        has_windows: whether llama.cpp computes sliding windows of such a model.
    """
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(context_length(config, has_windows))
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    values = config.to_dict()
    for name, add in (
        ("num_local_experts", writer.add_expert_count),
        ("num_experts", writer.add_expert_count),
        ("num_experts_per_tok", writer.add_expert_used_count),
        ("top_k_experts", writer.add_expert_used_count),
        ("moe_intermediate_size", writer.add_expert_feed_forward_length),
        ("shared_expert_intermediate_size", writer.add_expert_shared_feed_forward_length),
        ("attn_logit_softcapping", writer.add_attn_logit_softcapping),
        ("final_logit_softcapping", writer.add_final_logit_softcapping),
        ("attention_multiplier", writer.add_attention_scale),
        ("embedding_multiplier", writer.add_embedding_scale),
        ("residual_multiplier", writer.add_residual_scale),
        ("logits_scaling", writer.add_logit_scale),
        ("num_kv_shared_layers", writer.add_shared_kv_layers),
        ("hidden_size_per_layer_input", writer.add_embedding_length_per_layer_input),
    ):
        if values.get(name) is not None:
            add(values[name])
    _write_widths(writer, config)
    _write_rope(writer, config)
    _write_layer_kinds(writer, config, has_windows)


def _of_kind(config: PretrainedConfig, kind: str) -> Architecture:
    """Properties of the layers of a kind, which may have heads of another size than others (Gemma 4)."""
    differs = config.to_dict().get("per_layer_config") is not None
    return Architecture.of(config.per_layer_config[kind] if differs else config)


def _write_widths(writer: gguf.GGUFWriter, config: PretrainedConfig) -> None:
    """Write the widths of heads and of dense layers, as lists where layers differ."""
    kinds = Architecture.of(config).layer_kinds or (FULL,) * config.num_hidden_layers
    full, sliding = _of_kind(config, FULL), _of_kind(config, SLIDING)
    writer.add_key_length(full.head_dim)
    writer.add_value_length(full.head_dim)
    if sliding.head_dim != full.head_dim:
        writer.add_key_length_swa(sliding.head_dim)
        writer.add_value_length_swa(sliding.head_dim)
        writer.add_rope_dimension_count_swa(sliding.head_dim)
    writer.add_head_count_kv(_one_or_all([_of_kind(config, kind).kv_heads for kind in kinds]))
    width, narrow = config.intermediate_size, config.num_hidden_layers
    if getattr(config, "use_double_wide_mlp", False):
        narrow -= config.num_kv_shared_layers
    writer.add_feed_forward_length(_one_or_all([width if layer < narrow else 2 * width for layer in range(len(kinds))]))


def _one_or_all(values: list[int]) -> int | list[int]:
    return values if len(set(values)) > 1 else values[0]


def _write_rope(writer: gguf.GGUFWriter, config: PretrainedConfig) -> None:
    rope, *of_windows = rope_of(config)
    writer.add_rope_dimension_count(_rotated(config, rope))
    writer.add_rope_freq_base(rope["rope_theta"])
    for sliding in of_windows:
        writer.add_rope_freq_base_swa(sliding["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] != "yarn":
        return
    writer.add_rope_scaling_orig_ctx_len(int(rope["original_max_position_embeddings"]))
    for name, add in (
        ("beta_fast", writer.add_rope_scaling_yarn_beta_fast),
        ("beta_slow", writer.add_rope_scaling_yarn_beta_slow),
    ):
        if rope.get(name) is not None:
            add(rope[name])


def _rotated(config: PretrainedConfig, rope: Mapping[str, Any]) -> int:
    """Elements of a head that are rotated; all where those that are not have frequencies of 0."""
    factor = 1.0 if rope["rope_type"] == PROPORTIONAL else rope.get("partial_rotary_factor", 1.0)
    return int(_of_kind(config, FULL).head_dim * factor)


def _write_layer_kinds(writer: gguf.GGUFWriter, config: PretrainedConfig, has_windows: bool) -> None:
    """Write which layers have a sliding window, or gated delta nets in place of attention, and their sizes."""
    kinds = Architecture.of(config).layer_kinds
    if has_windows:
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern([kind == SLIDING for kind in kinds])
    if "linear_attention" not in kinds:
        return
    # Pairs by time, height and width in turn (transformers); a text has the same position in all three.
    pairs = _rotated(config, rope_of(config)[0]) // 2
    writer.add_rope_dimension_sections([(pairs + 2) // 3, (pairs + 1) // 3, pairs // 3, 0])
    interval = full_attention_interval(config)
    assert interval is not None  # checked by the family
    writer.add_full_attention_interval(interval)
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)


def rope_divisors(config: PretrainedConfig) -> torch.Tensor | None:
    """Divisors of the rotary frequencies, ``(head size / 2,)``, fp32, of Llama 3 and Gemma 4; None for the others."""
    rope = rope_of(config)[0]
    head_dim = _of_kind(config, FULL).head_dim
    if rope["rope_type"] == PROPORTIONAL:
        rotated = int(head_dim * rope["partial_rotary_factor"]) // 2
        return torch.tensor([rope.get("factor") or 1.0] * rotated + [_NOT_ROTATED] * (head_dim // 2 - rotated))
    if rope["rope_type"] != "llama3":
        return None
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    steps = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return (1.0 / rope["rope_theta"] ** steps) / scaled
