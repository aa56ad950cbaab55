"""Shape of a transformer, read from its Hugging Face style config."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import nn

from lit_callbacks.internals.transformers_internals import layer_configs

_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Entries that may hold the number of experts of a layer; which one depends on the model."""


@runtime_checkable
class HasConfig(Protocol):
    """A module with a config, as those of transformers have."""

    config: object


@runtime_checkable
class HasTextConfig(Protocol):
    """A config of several models, e.g. of text and of images."""

    def get_text_config(self) -> object:
        """The config of the text model."""


@dataclass(frozen=True)
class TransformerShape:
    """Sizes that the FLOPs of a transformer depend on, besides its weights."""

    layer_kinds: Sequence[str | None]
    """Kind of attention of each layer; None where the config does not tell."""
    attention_widths: Sequence[int]
    """Elements of all query heads of each layer together."""
    sliding_window: int | None
    """Width of sliding-window attention in tokens."""
    share_of_experts: float
    """Share of a layer's experts that a token goes through, 0 to 1; 1 without experts."""

    @classmethod
    def of(cls, model: nn.Module) -> "TransformerShape | None":
        """Shape of the only transformer within a module; None if no config has layers and attention heads.

        None too where a count of tokens does not tell the FLOPs: an encoder with a decoder, or several transformers
        (text and images, teacher and student).
        """
        shapes: dict[int, TransformerShape] = {}
        for module in model.modules():
            config: Any = module.config if isinstance(module, HasConfig) else None
            config = config.get_text_config() if isinstance(config, HasTextConfig) else config
            layers = layer_configs(config)
            if layers and all(_integer(layer, "num_attention_heads") is not None for layer in layers):
                if _value(config, "is_encoder_decoder"):
                    return None
                shapes[id(config)] = cls._of_config(config, layers)
        return next(iter(shapes.values())) if len(shapes) == 1 else None

    @classmethod
    def _of_config(cls, config: Any, layers: Sequence[Any]) -> "TransformerShape":
        first = layers[0]
        experts = next((count for name in _EXPERT_COUNTS if (count := _integer(first, name) or 0) > 0), 1)
        used = _integer(first, "num_experts_per_tok")
        return cls(
            layer_kinds=_value(config, "layer_types") or [None] * len(layers),
            attention_widths=[_attention_width(layer) for layer in layers],
            sliding_window=_integer(first, "sliding_window"),
            share_of_experts=1.0 if used is None else used / experts,
        )


def _attention_width(layer: Any) -> int:
    heads: int = layer.num_attention_heads
    return heads * (_integer(layer, "head_dim") or layer.hidden_size // heads)


def _value(config: object, name: str) -> Any:
    return getattr(config, name, None)


def _integer(config: object, name: str) -> int | None:
    value = _value(config, name)
    return value if isinstance(value, int) else None
