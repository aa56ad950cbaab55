"""Architectures that have a form in GGUF, their hyperparameters, and entries of a config that llama.cpp lacks."""

from dataclasses import dataclass

import gguf
import torch
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from lit_ft.errors import RecipeError
from lit_ft.model.architecture import Architecture
from lit_ft.model.config.positions import positions_of


@dataclass(frozen=True)
class Family:
    """How the models of an architecture are written."""

    arch: gguf.MODEL_ARCH
    pairs_neighbors: bool = False
    """Whether llama.cpp rotates neighboring elements of a head as pairs, and transformers elements of its two halves:
    the rows of queries and keys are then reordered."""
    has_projection_bias: bool = True
    """Whether llama.cpp reads biases of the projections."""


FAMILIES = {
    "LlamaForCausalLM": Family(gguf.MODEL_ARCH.LLAMA, pairs_neighbors=True),
    "MistralForCausalLM": Family(gguf.MODEL_ARCH.LLAMA, pairs_neighbors=True),
    "Qwen2ForCausalLM": Family(gguf.MODEL_ARCH.QWEN2),
    "Qwen3ForCausalLM": Family(gguf.MODEL_ARCH.QWEN3, has_projection_bias=False),
}
"""Families by the class of the Hugging Face model."""

_SCALINGS = ("default", "linear", "llama3", "yarn")
"""Types of rotary position embeddings that llama.cpp computes as transformers does."""


_OF_YARN = {"attention_factor", "mscale", "mscale_all_dim", "truncate"}
"""Yarn parameters that llama.cpp lacks, or reads in another way."""


def family_of(architecture: str, config: PretrainedConfig) -> Family:
    """Family of a model.

    Args:
        architecture: class of the Hugging Face model.
        config: config of the model.

    Raises:
        RecipeError: the architecture has no table, or its config asks for what llama.cpp does not compute.
    """
    if architecture not in FAMILIES:
        raise RecipeError(
            f"{architecture} cannot be written as GGUF by lit_ft, which has tables for {', '.join(FAMILIES)}; merge "
            "without --gguf, and convert the folder with llama.cpp's convert_hf_to_gguf.py"
        )
    family = FAMILIES[architecture]
    if refused := _not_computed(config, family):
        raise RecipeError(f"{architecture} with {refused} cannot be written as GGUF: llama.cpp does not compute it")
    return family


def _not_computed(config: PretrainedConfig, family: Family) -> str | None:
    """The entry of a config that llama.cpp does not compute; None if there is none."""
    rope = config.rope_parameters
    if config.hidden_act != "silu":
        return f"hidden_act={config.hidden_act!r}"
    if rope["rope_type"] not in _SCALINGS:
        return f"rope_type={rope['rope_type']!r}"
    if rope["rope_type"] == "yarn" and (set_by_hand := sorted(_OF_YARN & rope.keys())):
        return f"{', '.join(set_by_hand)} in its yarn parameters"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        return f"partial_rotary_factor={rope['partial_rotary_factor']}"
    if getattr(config, "attention_bias", False) and not family.has_projection_bias:
        return "attention_bias=True"
    return None


def context_length(config: PretrainedConfig) -> int:
    """Positions up to which llama.cpp computes what transformers does: it has no sliding window for these families."""
    positions = positions_of(config.max_position_embeddings, config.rope_parameters)
    window = getattr(config, "sliding_window", None)
    return min(positions, window) if window else positions


def write_hyperparameters(writer: gguf.GGUFWriter, config: PretrainedConfig) -> None:
    """Write the sizes of a model, its rotary position embeddings and its norms."""
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(context_length(config))
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = Architecture.of(config).head_dim
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_vocab_size(config.vocab_size)
    _write_rope(writer, config.rope_parameters)


def _write_rope(writer: gguf.GGUFWriter, rope: dict[str, float]) -> None:
    writer.add_rope_freq_base(rope["rope_theta"])
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


def rope_divisors(config: PretrainedConfig) -> torch.Tensor | None:
    """Divisors of the rotary frequencies, ``(head size / 2,)``, fp32, of Llama 3's scaling; None for the others."""
    if config.rope_parameters["rope_type"] != "llama3":
        return None
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    head_dim = Architecture.of(config).head_dim
    steps = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return (1.0 / config.rope_parameters["rope_theta"] ** steps) / scaled
