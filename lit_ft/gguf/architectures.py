"""Architectures that have a form in GGUF, and entries of a config that llama.cpp lacks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import gguf
from transformers import PretrainedConfig

from lit_ft.errors import RecipeError
from lit_ft.gguf.hyperparameters import FULL, PROPORTIONAL, SLIDING, full_attention_interval, rope_of

_SILU = {"hidden_act": "silu"}
_PLAIN = _SILU | {"attention_bias": False}
_GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False}
_EXPERTS_EVERYWHERE = {"decoder_sparse_step": 1, "mlp_only_layers": []}
_ROPE_STEP = 4
"""SmolLM3: each fourth layer has no rotary position embeddings in llama.cpp."""


def _scaled_otherwise(scaled_by_width: int) -> Callable[[PretrainedConfig], str | None]:
    """Check of Gemma's attention scale: by the head size, or by the width per head in models of so many layers."""

    def check(config: PretrainedConfig) -> str | None:
        by_width = config.num_hidden_layers == scaled_by_width
        expected = config.hidden_size // config.num_attention_heads if by_width else config.head_dim
        if config.query_pre_attn_scalar == expected:
            return None
        return f"query_pre_attn_scalar={config.query_pre_attn_scalar} and {config.num_hidden_layers} layers"

    return check


def _rotated_otherwise(config: PretrainedConfig) -> str | None:
    expected = [int((layer + 1) % _ROPE_STEP != 0) for layer in range(config.num_hidden_layers)]
    return None if config.no_rope_layers == expected else f"no_rope_layers={config.no_rope_layers}"


def _grouped_queries(config: PretrainedConfig) -> str | None:
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    return None if kv_heads == heads else f"num_key_value_heads={kv_heads} and {heads} heads"


def _based_otherwise(config: PretrainedConfig) -> str | None:
    bases = [rope["rope_theta"] for rope in rope_of(config)]
    return None if len(set(bases)) == 1 else f"rope_theta={bases[1]} in sliding windows, and {bases[0]} without"


def _shared_otherwise(config: PretrainedConfig) -> str | None:
    shared = config.num_kv_shared_layers
    with_own = config.layer_types[: config.num_hidden_layers - shared]
    if not shared or with_own[-2:] == [SLIDING, FULL]:
        return None
    return f"num_kv_shared_layers={shared} after layers of {' and '.join(with_own[-2:])}"


def _mixed_otherwise(config: PretrainedConfig) -> str | None:
    if config.linear_key_head_dim != config.linear_value_head_dim:
        return f"linear_key_head_dim={config.linear_key_head_dim} and another linear_value_head_dim"
    if full_attention_interval(config) is None:
        return "full attention in layers that are not equally far apart"
    return None


@dataclass(frozen=True)
class Family:
    """How the models of an architecture are written."""

    arch: gguf.MODEL_ARCH
    fixed: Mapping[str, Any] = field(default_factory=lambda: _SILU)
    """Entries of the config that are constants in llama.cpp."""
    scalings: tuple[str, ...] = ("default", "linear", "yarn")
    """Types of rotary position embeddings that llama.cpp computes as transformers does."""
    pairs_neighbors: bool = False
    """Whether llama.cpp rotates neighboring elements of a head as pairs, and transformers elements of its two halves:
    the rows of queries and keys are then reordered."""
    rotates_parts: bool = False
    """Whether llama.cpp can rotate a part of each head's elements."""
    norms_from_one: bool = False
    """Whether norms other than gated ones multiply by 1 + weight in transformers, and by the weight in llama.cpp."""
    has_windows: bool = False
    """Whether llama.cpp computes the sliding windows of these models."""
    rounds_activations: bool = False
    """Whether llama.cpp computes the activation in float16, as it does GELU on a CPU."""
    tokenizer_with_bytes: str = "llama"
    """Name of llama.cpp's tokenizer for BPE that has bytes as tokens."""
    refused: Callable[[PretrainedConfig], str | None] = lambda config: None
    """Function that returns what else in a config llama.cpp does not compute; None if it computes all."""


_LLAMA = Family(gguf.MODEL_ARCH.LLAMA, scalings=("default", "linear", "llama3", "yarn"), pairs_neighbors=True)
_GEMMA2 = Family(
    gguf.MODEL_ARCH.GEMMA2,
    _GEMMA,
    norms_from_one=True,
    has_windows=True,
    rounds_activations=True,
    refused=_scaled_otherwise(46),
)
_QWEN35 = Family(gguf.MODEL_ARCH.QWEN35, _PLAIN, norms_from_one=True, rotates_parts=True, refused=_mixed_otherwise)
FAMILIES = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "MixtralForCausalLM": _LLAMA,
    "Qwen2ForCausalLM": Family(gguf.MODEL_ARCH.QWEN2),
    "Qwen2MoeForCausalLM": Family(gguf.MODEL_ARCH.QWEN2MOE, _SILU | _EXPERTS_EVERYWHERE | {"norm_topk_prob": False}),
    "Qwen3ForCausalLM": Family(gguf.MODEL_ARCH.QWEN3, _PLAIN),
    "Qwen3MoeForCausalLM": Family(gguf.MODEL_ARCH.QWEN3MOE, _PLAIN | _EXPERTS_EVERYWHERE | {"norm_topk_prob": True}),
    "Qwen3_5ForCausalLM": _QWEN35,
    "Qwen3_5MoeForCausalLM": replace(_QWEN35, arch=gguf.MODEL_ARCH.QWEN35MOE),
    "Gemma2ForCausalLM": _GEMMA2,
    "Gemma3ForCausalLM": replace(
        _GEMMA2,
        arch=gguf.MODEL_ARCH.GEMMA3,
        fixed=_GEMMA | {"attn_logit_softcapping": None},
        refused=_scaled_otherwise(62),
    ),
    "Gemma4ForCausalLM": Family(
        gguf.MODEL_ARCH.GEMMA4,
        _GEMMA | {"use_bidirectional_attention": "vision"},
        scalings=("default", PROPORTIONAL),
        rotates_parts=True,
        has_windows=True,
        rounds_activations=True,
        tokenizer_with_bytes="gemma4",
        refused=_shared_otherwise,
    ),
    "Phi3ForCausalLM": Family(gguf.MODEL_ARCH.PHI3, rotates_parts=True),
    "Olmo2ForCausalLM": Family(gguf.MODEL_ARCH.OLMO2, _PLAIN),
    "Olmo3ForCausalLM": Family(gguf.MODEL_ARCH.OLMO2, _PLAIN, has_windows=True, refused=_based_otherwise),
    "GraniteForCausalLM": Family(gguf.MODEL_ARCH.GRANITE, _PLAIN, pairs_neighbors=True),
    "SmolLM3ForCausalLM": Family(gguf.MODEL_ARCH.SMOLLM3, _PLAIN, pairs_neighbors=True, refused=_rotated_otherwise),
    "SeedOssForCausalLM": Family(gguf.MODEL_ARCH.SEED_OSS),
    "Glm4ForCausalLM": Family(gguf.MODEL_ARCH.GLM4, rotates_parts=True),
    "Ernie4_5ForCausalLM": Family(gguf.MODEL_ARCH.ERNIE4_5, _SILU | {"use_bias": False}),
    "OlmoeForCausalLM": Family(
        gguf.MODEL_ARCH.OLMOE, _PLAIN | {"norm_topk_prob": False, "clip_qkv": None}, refused=_grouped_queries
    ),
}
"""Families by the class of the Hugging Face model."""

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
    if architecture.endswith("ForSequenceClassification"):
        raise RecipeError(
            f"{architecture} is a reward model, which scores texts and writes none, and lit_ft writes no GGUF of it; "
            "leave out --gguf and --gguf_adapter, and score with lit_ft.RewardModel('RUN/merged') (docs/preferences.md)"
        )
    if architecture not in FAMILIES:
        raise RecipeError(
            f"{architecture} cannot be written as GGUF by lit_ft, which has tables for {', '.join(FAMILIES)}; merge "
            "without --gguf, and convert the folder with llama.cpp's convert_hf_to_gguf.py"
        )
    family = FAMILIES[architecture]
    if refused := _not_computed(config, family) or family.refused(config):
        raise RecipeError(f"{architecture} with {refused} cannot be written as GGUF: llama.cpp does not compute it")
    return family


def _not_computed(config: PretrainedConfig, family: Family) -> str | None:
    """The entry of a config that llama.cpp does not compute; None if there is none."""
    for name, value in family.fixed.items():
        if (given := getattr(config, name, None)) is not None and given != value:
            return f"{name}={given!r}"
    for number, rope in enumerate(rope_of(config)):
        if rope["rope_type"] not in (family.scalings if number == 0 else ("default",)):
            return f"rope_type={rope['rope_type']!r}" + " in sliding windows" * number
        if rope["rope_type"] == "yarn" and (set_by_hand := sorted(_OF_YARN & rope.keys())):
            return f"{', '.join(set_by_hand)} in its yarn parameters"
        if rope.get("partial_rotary_factor", 1.0) != 1.0 and not family.rotates_parts:
            return f"partial_rotary_factor={rope['partial_rotary_factor']}"
    return None
