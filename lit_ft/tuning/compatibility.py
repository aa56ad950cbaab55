"""Compatibility of PEFT methods with this trainer, with merging, and with quantized base models."""

from typing import Any, cast

from peft import LoraConfig, PeftConfig

from lit_ft.errors import RecipeError
from lit_ft.tuning.lora_init import FROM_THE_BASE

_NEEDS_CALLS = "needs calls of its own while training, which are not made here"
_REFUSED = {
    **dict.fromkeys(("XLORA", "POLY", "MULTITASK_PROMPT_TUNING", "CPT", "CARTRIDGE"), _NEEDS_CALLS),
    "SHADOW": "runs a second model beside the base, which padding-free batches pass by",
    "LILY": "averages its routing over all tokens of a packed batch, so that samples would see each other (peft 0.21)",
    "FROD": "cannot be built without weights, so that a recipe could not be checked before they are read (peft 0.21)",
}
"""Methods that do not train correctly here, each with the reason."""


def check_method(peft: PeftConfig) -> None:
    """Refuse methods, and variants of LoRA, that would not train correctly.

    Raises:
        RecipeError: the method is one of them; the message gives the reason.
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


def check_mergeable(peft: PeftConfig) -> None:
    """Refuse to plan a merge for methods that cannot be merged into the base model's weights.

    Raises:
        RecipeError: the method is one of them; the message gives the reason.
    """
    if peft.is_prompt_learning or peft.peft_type.value in ("ADAPTION_PROMPT", "BOTTLENECK"):
        raise RecipeError(
            f"merge=true, but {peft.peft_type.value} adds no weights that could be merged into the base; leave merge "
            "out and use the adapter as it is, or take another method, e.g. peft.LoraConfig"
        )


def _refused_variant(lora: LoraConfig) -> tuple[str, str | None]:
    if lora.alora_invocation_tokens is not None:
        return "alora_invocation_tokens", "has to find its tokens in each sample of a packed batch, which PEFT does not"
    if lora.arrow_config is not None:
        return "arrow_config", "routes between adapters that are there; it trains none"
    if lora.monteclora_config is not None:
        return "monteclora_config", "draws its noise ahead of time, so that a resumed run would be another one"
    if lora.velora_config is not None and _get(lora.velora_config, "init_type") != "random":
        return "velora_config", "projects gradients on the mean of a micro-batch (set its init_type to random)"
    return "LORA", None


def _get(config: Any, name: str) -> Any:
    return config[name] if isinstance(config, dict) else getattr(config, name)


# --- quantized bases ---------------------------------------------------------------------------------


def check_quantized(peft: PeftConfig | None, quantization: str) -> None:
    """Refuse methods whose results on a quantized base model differ from those on the dequantized one.

    Args:
        peft: config of the tuning method.
        quantization: transformers' name for the quantization of the base model, e.g. ``gptq``.

    Raises:
        RecipeError: the method is one of them; the message names one that works.
    """
    if peft is None:
        return
    method = peft.peft_type.value
    if method not in _TUNING.get(quantization, {"LORA"}):
        raise RecipeError(
            f"model.peft: {method} works on the base's own weights, which are packed when the base is quantized "
            f"({quantization}); take peft.LoraConfig, or a base that is not"
        )
    if (why := _variant_that_fails(peft)) is not None:
        raise RecipeError(
            f"model.peft: {why} when the base is quantized; leave it out, take init_lora_weights=loftq or eva, or a "
            "base that is not"
        )


def _variant_that_fails(lora: Any) -> str | None:
    init = getattr(lora, "init_lora_weights", True)
    if isinstance(init, str) and init.startswith(FROM_THE_BASE):
        return f"init_lora_weights={init!r} changes the base's weights, which would be rounded again"
    if init == "orthogonal":
        return "init_lora_weights='orthogonal' draws in the dtype of the base's weights, which are packed"
    if getattr(lora, "kasa_config", None) is not None:
        return "kasa_config changes the base's weights, which would be rounded again"
    if getattr(lora, "velora_config", None) is not None:
        return "velora_config does nothing for packed layers (peft 0.21)"
    if getattr(lora, "use_bdlora", None) is not None:
        return "use_bdlora is left out by PEFT for packed layers, which would train plain LoRA (peft 0.21)"
    return None


_ON_QUANTIZED = {
    *("LORA", "IA3", "OFT", "BOFT", "VERA", "PVERA", "FOURIERFT", "WAVEFT", "LN_TUNING", "MISS", "RANDLORA", "VBLORA"),
    *("HIRA", "ROAD", "SHIRA", "BEFT", "TRAINABLE_TOKENS", "PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING"),
    *("ADALORA", "ADAPTION_PROMPT", "BOTTLENECK"),
}
"""Methods with equal results on an NF4 base model and on the same model dequantized (tests/tuning/test_tuning.py)."""


_ON_GPTQMODEL = {
    *("LORA", "OFT", "BOFT", "VERA", "LN_TUNING", "MISS", "TRAINABLE_TOKENS", "PROMPT_TUNING", "P_TUNING"),
}


_TUNING = {
    "bitsandbytes": _ON_QUANTIZED,
    "torchao": _ON_QUANTIZED - {"HIRA"},
    "gptq": _ON_GPTQMODEL,
    "awq": _ON_GPTQMODEL,
}
"""Methods that were compared in the same way, by quantization; with any other quantization only LoRA is allowed."""
