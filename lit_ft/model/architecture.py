"""Properties that Hugging Face configs state for some architectures and leave out for others, with their defaults."""

from collections.abc import Callable
from dataclasses import dataclass

from transformers import PretrainedConfig
from transformers.utils import ModelOutput

Decoder = Callable[..., ModelOutput]
"""Decoder of a model, or a part of it: takes Hugging Face's inputs by name; ``last_hidden_state`` of its output is
``(samples, length, H)``."""


@dataclass(frozen=True)
class Architecture:
    """Properties of a decoder, from its config."""

    attention_kinds: frozenset[str]
    """Kinds of its layers' attention, e.g. ``full_attention``."""
    kv_heads: int
    """Number of key and value heads of a layer."""
    head_dim: int
    """Size of one attention head."""
    experts_per_token: int
    """Number of experts that compute a token; 1 in dense models."""
    caps_logits: bool
    """Whether attention logits are capped (Gemma 2)."""
    has_sinks: bool
    """Whether attention has sinks (gpt-oss)."""
    is_tied: bool
    """Whether head and embeddings are one weight."""
    expert_plan: dict[str, str]
    """Hugging Face's styles of modules under expert parallelism, by their names in the decoder."""
    router_coefficient: float | None
    """Coefficient of the router's auxiliary loss; None if the config has none."""
    wants_router_loss: bool
    """Whether the config asks for that loss."""

    @classmethod
    def of(cls, config: PretrainedConfig) -> "Architecture":
        """Properties of the text decoder of a config."""
        text = config.get_text_config()
        heads = getattr(text, "num_attention_heads", None) or 1
        width = getattr(text, "hidden_size", None) or 0
        return cls(
            attention_kinds=frozenset(getattr(text, "layer_types", None) or ["full_attention"]),
            kv_heads=getattr(text, "num_key_value_heads", None) or heads,
            head_dim=getattr(text, "head_dim", None) or width // heads,
            experts_per_token=getattr(text, "num_experts_per_tok", None) or 1,
            caps_logits=bool(getattr(text, "attn_logit_softcapping", None)),
            has_sinks=text.model_type == "gpt_oss",
            is_tied=bool(getattr(config, "tie_word_embeddings", False)),
            expert_plan=getattr(config, "base_model_ep_plan", None) or {},
            router_coefficient=getattr(text, "router_aux_loss_coef", None),
            wants_router_loss=bool(getattr(text, "output_router_logits", False)),
        )
