"""PEFT's methods: which are refused and why, and what some of them must be told of the model."""

from collections.abc import Callable
from typing import Any, cast

import torch
from peft import LoraConfig, PeftConfig, PeftModel
from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING
from peft.tuners.adaption_prompt.config import TRANSFORMERS_MODEL_CONFIG
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTuner, cast_adapter_dtype
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn

from lit_ft import late_casting
from lit_ft.errors import RecipeError

_NEEDS_CALLS = "needs calls of its own while training, which are not made here"
_REFUSED = {
    **dict.fromkeys(("XLORA", "POLY", "MULTITASK_PROMPT_TUNING", "CPT", "CARTRIDGE"), _NEEDS_CALLS),
    "SHADOW": "runs a second model beside the base, which padding-free rows pass by",
    "LILY": "averages its routing over all tokens of a row, so that samples would see each other (peft 0.21)",
    "FROD": "cannot be built without weights, so that a recipe could not be checked before they are read (peft 0.21)",
}
"""Methods that do not train right here, and why."""


def check_method(peft: PeftConfig) -> None:
    """Refuse methods, and variants of LoRA, that would not train right.

    Raises:
        RecipeError: it says why.
    """
    if peft.task_type not in (None, "CAUSAL_LM"):
        raise RecipeError(f"model.peft: task_type={peft.task_type} is not for causal language models; leave it out")
    name = peft.peft_type.value
    reason = _REFUSED.get(name)
    if name == "LORA":
        name, reason = _refused_variant(cast(LoraConfig, peft))
    options: Any = peft
    if name == "ADALORA" and options.target_r >= options.init_r:
        raise RecipeError(
            f"model.peft: AdaLoRA lowers ranks from init_r={options.init_r} to target_r={options.target_r} on average; "
            "raise init_r"
        )
    if name == "ADAMSS" and options.use_asa:
        name, reason = (
            "use_asa=true",
            "freezes weights while training, which the optimizer and checkpoints know nothing of",
        )
    if reason is not None:
        raise RecipeError(f"model.peft: {name} {reason}; take another method, e.g. peft.LoraConfig")


def give_values(skeleton: nn.Module, peft: PeftConfig) -> None:
    """Give a model on the meta device values to look at, for the methods that look at them when they are made.

    Args:
        skeleton: changed in place; small random weights on the CPU, whose memory is free again after the check.
        peft: the method.
    """
    if peft.peft_type.value in _LOOK_AT_WEIGHTS or getattr(peft, "velora_config", None) is not None:
        skeleton.to_empty(device="cpu")
        for weight in skeleton.parameters():
            nn.init.normal_(weight, std=0.02)


_LOOK_AT_WEIGHTS = {"ADAMSS", "SHIRA"}


def check_mergeable(peft: PeftConfig) -> None:
    """Refuse to plan a merge of a method that adds no weights to the base's.

    Raises:
        RecipeError: it says why.
    """
    if peft.is_prompt_learning or peft.peft_type.value in ("ADAPTION_PROMPT", "BOTTLENECK"):
        raise RecipeError(
            f"merge=true, but {peft.peft_type.value} adds no weights that could be merged into the base; leave merge "
            "out and use the adapter as it is, or take another method, e.g. peft.LoraConfig"
        )


def wrap_in_final_dtype(
    base: nn.Module, peft: PeftConfig, wrap: Callable[[], PeftModel], in_float32: bool
) -> PeftModel:
    """Wrap a base whose weights are cast later, so that its adapter is that of a base which is cast already.

    PEFT draws new weights in the dtype of the layer that they are added to, or computes them from its weights: one
    layer at a time has its final dtype meanwhile.

    Args:
        base: with noted dtypes (``late_casting.mark``).
        peft: the method.
        wrap: makes the ``PeftModel``.
        in_float32: whether ``wrap`` casts the adapter's weights to float32.
    """
    tuner: Any = PEFT_TYPE_TO_TUNER_MAPPING.get(peft.peft_type)
    if peft.is_prompt_learning:
        wrapped = wrap()
    elif isinstance(tuner, type) and issubclass(tuner, BaseTuner):
        wrapped = _layer_by_layer(tuner, wrap)
    else:  # LLaMA-Adapter puts its prompts in without BaseTuner's steps
        late_casting.cast(base)
        wrapped = wrap()
    _cast_copies(wrapped, next(p.cast_to for p in base.parameters() if hasattr(p, "cast_to")), in_float32)
    return wrapped


def _layer_by_layer(tuner: Any, wrap: Callable[[], PeftModel]) -> PeftModel:
    create = tuner._create_and_replace

    def with_final_dtype(self: Any, config: PeftConfig, adapter: str, target: nn.Module, *args: Any, **kw: Any) -> Any:
        with late_casting.cast_meanwhile(target):
            return create(self, config, adapter, target, *args, **kw)

    tuner._create_and_replace = with_final_dtype
    try:
        return wrap()
    finally:
        tuner._create_and_replace = create


def _cast_copies(model: nn.Module, dtype: torch.dtype, in_float32: bool) -> None:
    """Cast what ``modules_to_save`` and trainable tokens have copied from the base, in the dtype of its file."""
    for wrapper in (module for module in model.modules() if isinstance(module, AuxiliaryTrainingWrapper)):
        for tensor in [*wrapper.parameters(), *wrapper.buffers()]:
            if tensor.is_floating_point() and not hasattr(tensor, "cast_to"):
                tensor.data = tensor.data.to(dtype)
        cast_adapter_dtype(wrapper, "default", in_float32)  # of tokens alone: PEFT leaves modules_to_save as they are


def check_ranks(model: PeftModel) -> None:
    """Refuse LoRA of a rank above a layer's size, which would train more than the layer has.

    Raises:
        RecipeError: it names the layer.
    """
    for name, layer in model.named_modules():
        if not isinstance(layer, LoraLayer) or not isinstance(layer.get_base_layer(), nn.Linear):
            continue
        size, rank = min(layer.in_features, layer.out_features), layer.r.get("default", 0)
        if rank > size:
            raise RecipeError(
                f"model.peft: rank {rank} is above the size of {name.removeprefix('base_model.model.')} "
                f"({layer.out_features} x {layer.in_features}); lower r to {size} or less, or leave the layer out"
            )


def _refused_variant(lora: LoraConfig) -> tuple[str, str | None]:
    if lora.alora_invocation_tokens is not None:
        return "alora_invocation_tokens", "has to find its tokens in each sample of a row, which PEFT does not"
    if lora.arrow_config is not None:
        return "arrow_config", "routes between adapters that are there; it trains none"
    if lora.monteclora_config is not None:
        return "monteclora_config", "draws its noise ahead of time, so that a resumed run would be another one"
    if lora.velora_config is not None and _get(lora.velora_config, "init_type") != "random":
        return "velora_config", "projects gradients on the mean of a micro-batch (set its init_type to random)"
    return "LORA", None


def _get(config: Any, name: str) -> Any:
    return config[name] if isinstance(config, dict) else getattr(config, name)


def adapt_to_architecture(model: nn.Module, peft: PeftConfig) -> None:
    """Tell PEFT what LLaMA-Adapter needs to know of the model's attention; PEFT lists three architectures.

    Raises:
        RecipeError: its attention is not built like Llama's.
    """
    kind: str = cast(Any, model).config.model_type
    if peft.peft_type.value != "ADAPTION_PROMPT" or kind in TRANSFORMERS_MODEL_CONFIG:
        return
    config = cast(Any, model).config.get_text_config()
    names = {name.rsplit(".", 1)[-1] for name, _ in model.named_modules()}
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if not {"self_attn", "q_proj", "k_proj", "v_proj", "o_proj"} <= names or "q_norm" in names:
        why = "its attention is not built like Llama's (self_attn with q_proj, k_proj, v_proj and o_proj, no q_norm)"
    elif width * config.num_attention_heads != config.hidden_size:
        why = f"its {config.num_attention_heads} heads of {width} are not its hidden size of {config.hidden_size}"
    else:
        TRANSFORMERS_MODEL_CONFIG[kind] = TRANSFORMERS_MODEL_CONFIG["llama"]
        return
    raise RecipeError(f"model.peft: LLaMA-Adapter does not fit {type(model).__name__}: {why}; take peft.LoraConfig")
