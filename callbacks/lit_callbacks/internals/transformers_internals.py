"""Private and undeclared attributes of transformers' models and configs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def is_quantized(model: PreTrainedModel) -> bool:
    """Whether a model holds packed 4-bit or 8-bit weights: only such models have the attribute."""
    return bool(getattr(model, "is_quantized", False))


def ties_embeddings(config: PretrainedConfig) -> bool:
    """Whether a config ties the output head to the input embedding; not all configs have the entry."""
    return bool(getattr(config, "tie_word_embeddings", False))


def attention_implementation(config: PretrainedConfig) -> str:
    """Name of the attention function that a model uses."""
    return str(config._attn_implementation)


def kept_in_fp32(model: PreTrainedModel) -> tuple[str, ...]:
    """Names of submodules that a model's class keeps in fp32, whatever the model's dtype."""
    return tuple(getattr(model, "_keep_in_fp32_modules_strict", None) or ())


def save_under_names_of(model: PreTrainedModel, loaded: PreTrainedModel) -> None:
    """Let a model save its tensors under the names in the files that ``loaded`` was loaded from."""
    model._weight_conversions = getattr(loaded, "_weight_conversions", None)
