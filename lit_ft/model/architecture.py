"""Properties that Hugging Face configs state for some architectures and leave out for others, with their defaults."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from lit_callbacks.protocols import HasScore
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import ModelOutput

from lit_ft.internals.transformers import global_value

Decoder = Callable[..., ModelOutput]
"""Decoder of a model, or a part of it: takes Hugging Face's inputs by name; ``last_hidden_state`` of its output is
``(samples, length, H)``."""


def head_layer(model: PreTrainedModel) -> nn.Linear:
    """Last layer of a model, from hidden states to logits or a score; None in a model that has none of them."""
    head: nn.Linear = model.score if isinstance(model, HasScore) else model.get_output_embeddings()
    return head


def replace_head(model: PreTrainedModel, layer: nn.Module) -> None:
    """Put another layer in the place of ``head_layer``."""
    if isinstance(model, HasScore):
        model.score = layer  # type: ignore[assignment]
    else:
        model.set_output_embeddings(layer)


_WITH_MAMBA_2 = frozenset("bamba falcon_h1 granitemoehybrid mamba2 nemotron_h zamba2".split())
_READ_FROM_OUTSIDE = {
    "dt_proj": frozenset({"falcon_mamba", "jamba", "mamba"}),
    "x_proj": frozenset({"falcon_mamba", "mamba"}),
    "out_proj": _WITH_MAMBA_2 | {"falcon_mamba", "mamba"},
    "correction_coefs": frozenset({"gemma3n", "gemma3n_text"}),
}
"""By a linear layer's last name: architectures in which the module around it multiplies by its weight itself, with the
kernels of mamba_ssm or without (transformers 5.24)."""
_NORMS_READ_FROM_OUTSIDE = re.compile(r"(.*\.)?(mamba|mixer)\.norm")
"""The same for the gated norm within a Mamba-2 layer."""
_CHANGED_FROM_OUTSIDE = {
    "classifier": frozenset({"longcat_flash"}),
    "prediction_coefs": frozenset({"gemma3n", "gemma3n_text"}),
    "weights_proj": frozenset({"dots3_note", "dots3_note_text", "hy_v4"}),
    "message_gate.down_proj": frozenset({"inkling2_loop", "inkling2_loop_text"}),
}
"""The same for layers whose weight it casts or clamps, or to whose dtype it casts their inputs; an adapter on them is
computed."""
_ROUTERS = {"router": frozenset({"llama4", "llama4_text", "phimoe"})}
"""The same for routers that are derived from ``nn.Linear``; they return more than a product (transformers 5.24)."""


def read_from_outside(config: PretrainedConfig) -> set[str]:
    """Last names of linear layers whose weight is read past an adapter around them."""
    return {name for name, kinds in _READ_FROM_OUTSIDE.items() if config.model_type in kinds}


def is_norm_read_from_outside(config: PretrainedConfig, name: str) -> bool:
    """Whether a module is a norm whose weight is read past an adapter around it."""
    return config.model_type in _WITH_MAMBA_2 and _NORMS_READ_FROM_OUTSIDE.fullmatch(name) is not None


def not_to_pack(config: PretrainedConfig) -> set[str]:
    """Last names of linear layers whose weight must stay a matrix."""
    changed = {name for name, kinds in _CHANGED_FROM_OUTSIDE.items() if config.model_type in kinds}
    return changed | read_from_outside(config)


def linear_routers(config: PretrainedConfig) -> set[str]:
    """Last names of routers that packages which quantize linear layers take for one."""
    return {name for name, kinds in _ROUTERS.items() if config.model_type in kinds}


@dataclass(frozen=True)
class Architecture:
    """Properties of a decoder, from its config."""

    layer_kinds: tuple[str, ...]
    """Kind of each layer, e.g. ``full_attention``; empty if the config names none."""
    attention_chunk: int | None
    """Tokens of a chunk that layers of ``chunked_attention`` attend within; None without such layers (Llama 4)."""
    kv_heads: int
    """Number of key and value heads of a layer."""
    head_dim: int
    """Size of one attention head."""
    experts_per_token: int
    """Number of experts that compute a token; 1 in dense models."""
    is_decoder: bool
    """Whether the config says so; for BERT and its like, tokens otherwise attend to later ones too."""
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
        heads = global_value(text, "num_attention_heads") or 1
        width = getattr(text, "hidden_size", None) or 0
        kinds = tuple(getattr(text, "layer_types", None) or ())
        return cls(
            layer_kinds=kinds,
            attention_chunk=text.attention_chunk_size if "chunked_attention" in kinds else None,
            kv_heads=global_value(text, "num_key_value_heads") or heads,
            head_dim=global_value(text, "head_dim") or width // heads,
            experts_per_token=getattr(text, "num_experts_per_tok", None) or 1,
            is_decoder=bool(getattr(text, "is_decoder", True)),
            is_tied=bool(getattr(config, "tie_word_embeddings", False)),
            expert_plan=getattr(config, "base_model_ep_plan", None) or {},
            router_coefficient=getattr(text, "router_aux_loss_coef", None),
            wants_router_loss=bool(getattr(text, "output_router_logits", False)),
        )
