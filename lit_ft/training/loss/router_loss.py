"""Auxiliary load-balancing loss for the router of a mixture-of-experts model."""

import sys
from typing import Literal

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from lit_ft.errors import RecipeError
from lit_ft.internals.transformers import with_decoder
from lit_ft.model.architecture import Architecture

RouterAuxLoss = float | Literal["config"] | None


def coefficient(base: PreTrainedModel, asked: RouterAuxLoss) -> float:
    """Coefficient of the auxiliary loss; 0 if it is not used.

    Raises:
        RecipeError: the config has no coefficient, or transformers has no such loss for the model.
    """
    if asked is None:
        return 0.0
    if not hasattr(sys.modules[type(base).__module__], "load_balancing_loss_func"):
        raise RecipeError(
            f"model.router_aux_loss={asked}: transformers computes no such loss for {type(base).__name__}; leave it out"
        )
    factor = Architecture.of(base.config).router_coefficient if asked == "config" else asked
    if factor is None:
        raise RecipeError(
            f"model.router_aux_loss={asked}, but the config of {type(base).__name__} has no router_aux_loss_coef; give "
            "a number, or leave it out"
        )
    return float(factor)


def say_what_is_left_out(base: PreTrainedModel) -> None:
    """Print a notice if the config asks for the auxiliary loss."""
    model = Architecture.of(base.config)
    if model.wants_router_loss and (factor := model.router_coefficient):
        rank_zero_info(
            f"config.json asks for a router auxiliary loss (output_router_logits, router_aux_loss_coef={factor:g}), "
            "which is left out; model.router_aux_loss: config takes it in"
        )


class _RouterLogits(nn.Module):
    """Replacement for the decoder that returns given router logits."""

    def __init__(self, hidden: Tensor, router_logits: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.output = MoeModelOutputWithPast(last_hidden_state=hidden, router_logits=router_logits)

    def forward(self, *_: object, **__: object) -> MoeModelOutputWithPast:
        return self.output


def router_loss(base: PreTrainedModel, decoder_output: MoeModelOutputWithPast) -> Tensor:
    """Auxiliary loss of the decoder's tokens, as the model itself computes it: a scalar without coefficient.

    The model's ``forward`` runs on one token without its decoder, so that each architecture uses its own formula. The
    output of the decoder has router logits (``output_router_logits=True``).
    """
    token = decoder_output.last_hidden_state[:, :1].detach()
    model = with_decoder(base, _RouterLogits(token, decoder_output.router_logits))
    loss = model(inputs_embeds=token, output_router_logits=True, use_cache=False).aux_loss
    assert isinstance(loss, Tensor), "the decoder gave router logits"
    return loss
