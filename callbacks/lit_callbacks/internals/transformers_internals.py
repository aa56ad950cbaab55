"""Private and undeclared attributes of transformers' models and configs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel


def is_quantized(model: PreTrainedModel) -> bool:
    """Whether a model holds packed 4-bit or 8-bit weights: only such models have the attribute."""
    return bool(getattr(model, "is_quantized", False))


def is_encoder_decoder(config: PretrainedConfig) -> bool:
    """Whether a model has an encoder whose output its decoder reads; not all configs have the entry."""
    return bool(getattr(config, "is_encoder_decoder", False))


def layer_configs(config: object) -> list[object]:
    """Config of each layer, which may depart from the model's (Gemma 4); empty for a config without layers."""
    layers = getattr(config, "num_hidden_layers", None)
    if not isinstance(layers, int):
        return []
    return list(config.per_layer_config) if getattr(config, "is_heterogeneous", False) else [config] * layers  # type: ignore[attr-defined]


def ties_embeddings(config: PretrainedConfig) -> bool:
    """Whether a config ties the output head to the input embedding; not all configs have the entry."""
    return bool(getattr(config, "tie_word_embeddings", False))


def attention_implementation(config: PretrainedConfig) -> str:
    """Name of the attention function that a model uses; ``set_attn_implementation`` only sets it."""
    return str(config._attn_implementation)


def portable_attention(model: PreTrainedModel) -> str:
    """Name of an attention function that takes padded batches on any device: SDPA, or ``eager`` without support."""
    return "sdpa" if model._supports_sdpa else "eager"


def kept_in_fp32(model: PreTrainedModel, dtype: torch.dtype) -> re.Pattern[str]:
    """Pattern that is found in the names of weights that transformers keeps in fp32 in a model of another dtype.

    Some classes keep weights in fp32 in any dtype (routers), some in fp16 alone (norms of gpt-oss).
    """
    kept = model._get_dtype_plan(dtype)
    return re.compile("|".join(one.replace("*", ".*") for one in kept) or "(?!)")


def scale_embeddings_as(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Give embeddings the scale of a model that is loaded in a dtype: Gemma's is rounded to that of its weights."""
    for module in model.modules():
        if (scale := getattr(module, "scalar_embed_scale", None)) is not None:
            module.embed_scale = module.embed_scale.new_tensor(scale, dtype=dtype)


def save_under_names_of(model: PreTrainedModel, loaded: PreTrainedModel) -> None:
    """Let a model save its tensors under the names in the files that ``loaded`` was loaded from."""
    model._weight_conversions = getattr(loaded, "_weight_conversions", None)


def save_under_names_read(model: PreTrainedModel) -> None:
    """Let a model that was read from files save its tensors under the names that they had there.

    Under DeepSpeed's ZeRO-3, transformers notes conversions that none of these names needed too (5.24).
    """
    if was_read(model):
        model._weight_conversions = [one for one in model._weight_conversions if one.was_used()]


def dequantize(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Dequantize a model, which keeps the names that its tensors have in files, and the layers of GPT-2.

    transformers 5.24 forgets the first, and makes linear layers of the last, whose weights in files are transposed.

    Raises:
        NotImplementedError: transformers cannot dequantize such weights.
    """
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    conversions = getattr(model, "_weight_conversions", None)
    transposed = [name for name, part in model.named_modules() if getattr(part, "source_cls", None) is Conv1D]
    plain: PreTrainedModel = model.dequantize(dtype)
    for name in transposed:
        linear = plain.get_submodule(name)
        layer = Conv1D(linear.out_features, linear.in_features)
        layer.weight, layer.bias = nn.Parameter(linear.weight.T.contiguous()), linear.bias
        plain.set_submodule(name, layer)
    plain._weight_conversions = conversions
    return plain


# --- names of tensors in weight files ----------------------------------------------------------------


def was_read(model: PreTrainedModel) -> bool:
    """Whether a model was read from files: ``from_pretrained`` notes how it converted their names."""
    return getattr(model, "_weight_conversions", None) is not None


def names_in_model(model: PreTrainedModel, names: Iterable[str], only_renamed: bool = False) -> dict[str, str]:
    """Names that tensors of weight files have in a model, or would have if the model had them.

    Args:
        model: model, which may be on the meta device.
        names: names in the files.
        only_renamed: whether to leave out tensors that are split or joined while they are read.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    conversions, own = get_model_conversion_mapping(model), model.state_dict()
    renamings = [one for one in conversions if isinstance(one, WeightRenaming)]
    converters = [one for one in conversions if isinstance(one, WeightConverter)]
    names_in_model_by_file = {}
    for name in sorted(names, key=dot_natural_key):  # some conversions rely on this order
        renamed, converter = rename_source_key(name, renamings, converters, type(model).base_model_prefix, own)
        if renamed not in own and name in own:
            renamed, converter = name, None
        if not (only_renamed and converter is not None):
            names_in_model_by_file[name] = renamed
    return names_in_model_by_file


def tied_tensors(model: PreTrainedModel) -> set[str]:
    """Names of tensors that are another tensor of the model, and are not saved."""
    return set(model.all_tied_weights_keys)


def save_under_names_in(model: PreTrainedModel, skeleton: PreTrainedModel, published: Iterable[str]) -> None:
    """Let a model save its tensors without the prefix of its base model, if the files it was read from have none.

    transformers adds the prefix while it reads (GPT-2's files have none), and does not note it.

    Args:
        model: model that was read from files.
        skeleton: model of the same class and config on the meta device.
        published: names of the tensors in the files.
    """
    from transformers.core_model_loading import PrefixChange, revert_weight_conversion

    skeleton._weight_conversions = model._weight_conversions
    prefix, known = f"{model.base_model_prefix}.", set(published)
    saved = {name for name in revert_weight_conversion(skeleton, skeleton.state_dict()) if name.startswith(prefix)}
    if saved.isdisjoint(known) and any(name.removeprefix(prefix) in known for name in saved):
        model._weight_conversions = [*model._weight_conversions, PrefixChange(prefix_to_add=model.base_model_prefix)]


def save_under_own_names(model: PreTrainedModel) -> None:
    """Let a model that is part of a larger one save its tensors without the prefix that they have there."""
    from transformers.core_model_loading import PrefixChange

    if was_read(model):
        conversions = model._weight_conversions
        model._weight_conversions = [one for one in conversions if not isinstance(one, PrefixChange)]


def read_the_text_part(model_type: str) -> None:
    """Let models for text read the files of a larger model that they are part of, in both layouts that are published.

    These are ``language_model.model.*`` (Gemma 3) and ``model.language_model.*`` (Qwen3.5). transformers has this for
    some types only. Files of the type's own are read as before.

    Args:
        model_type: type of the text model, as its config states it.
    """
    from transformers.conversion_mapping import (
        get_checkpoint_conversion_mapping,
        register_checkpoint_conversion_mapping,
    )
    from transformers.core_model_loading import PrefixChange

    own = get_checkpoint_conversion_mapping(model_type) or []
    if not any(isinstance(one, PrefixChange) for one in own):
        prefixes = [
            PrefixChange(prefix_to_remove="language_model"),
            PrefixChange(prefix_to_remove="language_model", model_prefix="model"),
        ]
        register_checkpoint_conversion_mapping(model_type, [*prefixes, *own], overwrite=True)
