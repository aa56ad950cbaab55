"""Layers into which PEFT cannot merge what was trained: biases where there is none, and norms without a weight."""

from collections.abc import Iterator

from peft.tuners.beft.layer import BeftLayer
from peft.tuners.ln_tuning.layer import LNTuningLayer
from peft.tuners.lora import LoraLayer
from torch import nn

from lit_ft.errors import RecipeError


def reason(model: nn.Module) -> str | None:
    """Why the adapter of a model cannot be merged, by the first layer for which it cannot; None if it can."""
    return next(_reasons(model), None)


def check_merged(model: nn.Module) -> None:
    """Refuse a merge where a layer could not be merged: a merged model has the shapes of its base.

    Raises:
        RecipeError: there is such a layer.
    """
    if (why := reason(model)) is not None:
        raise RecipeError(
            f"merge=true: {why}; leave merge out and use the adapter as it is, or name other layers in target_modules"
        )


def _reasons(model: nn.Module) -> Iterator[str]:
    for full_name, layer in model.named_modules():
        name = full_name.rpartition("base_model.model.")[2]
        trains_bias = isinstance(layer, BeftLayer) or (isinstance(layer, LoraLayer) and any(layer.lora_bias.values()))
        if trains_bias and getattr(layer.get_base_layer(), "bias", None) is None:
            method = "BEFT" if isinstance(layer, BeftLayer) else "lora_bias=true"
            yield f"{method} trains biases, and {name} has none to add them to"
        if isinstance(layer, LNTuningLayer) and not hasattr(layer.get_base_layer(), "weight"):
            yield f"PEFT merges norms with a weight of their own, and {name} is none"
