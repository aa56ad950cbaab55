"""Layers without a bias, into which the biases of BEFT, and of LoRA's ``lora_bias``, cannot be merged."""

from collections.abc import Iterator

from peft.tuners.beft.layer import BeftLayer
from peft.tuners.lora import LoraLayer
from torch import nn

from lit_ft.errors import RecipeError


def unmerged(model: nn.Module) -> str | None:
    """Name of a layer into which a merge cannot add a bias, as it has none; None if there is no such layer."""
    names = (name.rpartition("base_model.model.")[2] for name, layer in _with_biases(model) if _has_none(layer))
    return next(names, None)


def check_merged(model: nn.Module) -> None:
    """Refuse a merge where a layer could not be merged: a merged model has the shapes of its base.

    Raises:
        RecipeError: there is such a layer.
    """
    if (name := unmerged(model)) is not None:
        method = "BEFT" if any(isinstance(layer, BeftLayer) for layer in model.modules()) else "lora_bias=true"
        raise RecipeError(
            f"merge=true: {method} trains biases, and {name} has none to add them to; leave merge out and use the "
            "adapter as it is, or name layers with a bias in target_modules"
        )


def _with_biases(model: nn.Module) -> Iterator[tuple[str, BeftLayer | LoraLayer]]:
    for name, layer in model.named_modules():
        if isinstance(layer, BeftLayer) or (isinstance(layer, LoraLayer) and any(layer.lora_bias.values())):
            yield name, layer


def _has_none(layer: BeftLayer | LoraLayer) -> bool:
    return getattr(layer.get_base_layer(), "bias", None) is None
