"""Layers without a bias, into which the biases that BEFT trains cannot be merged."""

from peft.tuners.beft.layer import BeftLayer
from torch import nn

from lit_ft.errors import RecipeError


def unmerged(model: nn.Module) -> str | None:
    """Name of a layer into which a merge cannot add BEFT's bias, as it has none; None if there is no such layer."""
    layers = ((n, layer) for n, layer in model.named_modules() if isinstance(layer, BeftLayer))
    names = (n.rpartition("base_model.model.")[2] for n, layer in layers if layer.get_base_layer().bias is None)
    return next(names, None)


def check_merged(model: nn.Module) -> None:
    """Refuse ``merge: true`` where a layer could not be merged: a merged model has the shapes of its base.

    Raises:
        RecipeError: there is such a layer.
    """
    if (name := unmerged(model)) is not None:
        raise RecipeError(
            f"merge=true: BEFT trains biases, and {name} has none to add them to; leave merge out and use the adapter "
            "as it is, or name layers with a bias in target_modules"
        )
