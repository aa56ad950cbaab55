"""Divergence of the model that trains from its reference: the base model, which it is without its adapter."""

from collections.abc import Callable

import torch
from lightning.pytorch import LightningModule
from peft import PeftModel
from torch import Tensor

from lit_ft.errors import RecipeError
from lit_ft.internals.peft import adapters_off
from lit_ft.packed_batch import PackedBatch
from lit_ft.training.loss.token_cross_entropy import LossOf

LARGEST_DIFFERENCE = 0.01
"""Mean difference of a token's cross-entropy, in nats, up to which a new adapter changes nothing."""


def divergence(per_token: Tensor, batch: PackedBatch) -> Tensor:
    """Estimate of the Kullback-Leibler divergence from the reference at each target, ``(n,)``, in nats, 0 or above.

    The third estimator of Schulman 2020 (http://joschu.net/blog/kl-approx.html), as in GRPO (arXiv:2402.03300, equation
    4): ``r - log(r) - 1``, where r is the reference's probability of the token over the model's.

    Args:
        per_token: cross-entropy of each target, ``(n,)``.
        batch: packed batch with ``target_reference``.
    """
    difference = per_token - batch["target_reference"]
    return difference.exp() - difference - 1


def loss_of_answers(batch: PackedBatch) -> LossOf:
    """Summed loss of a batch's targets, with their divergence from the reference."""
    weights, kl_weights = batch["target_weights"], batch["target_kl_weights"]

    def loss_of(per_token: Tensor, has_gradient: bool) -> tuple[Tensor, Tensor | None]:
        loss = (weights * per_token + kl_weights * divergence(per_token, batch)).sum()
        if not has_gradient:
            return loss, None
        return loss, weights + kl_weights * ((per_token - batch["target_reference"]).exp() - 1)

    return loss_of


def reference_losses(module: LightningModule, model: PeftModel, batch: PackedBatch, is_new: bool) -> Tensor:
    """Cross-entropy of a batch's targets by the base model, ``(n,)``; a collective where ranks share weights.

    Args:
        module: module whose forward pass gives the loss of a packed batch, in evaluation mode.
        model: the model with its adapter.
        batch: packed batch.
        is_new: whether nothing has trained yet, so that the adapter must change nothing.

    Raises:
        RecipeError: the adapter cannot be switched off, or changes the model before it has trained.
    """
    compute: Callable[[], Tensor] = lambda: module(batch).per_token  # noqa: E731
    with torch.no_grad():
        try:
            with adapters_off(model):
                reference = compute()
        except ValueError as error:
            raise RecipeError(
                f"model.kl_weight compares the model with itself without its adapter: {error}; set kl_weight to 0, or "
                "take LoRA"
            ) from error
        if is_new:
            differences = (compute() - reference).abs()  # on all ranks, also those without a target
            difference = float(differences.mean()) if len(differences) else 0.0
            if not difference <= LARGEST_DIFFERENCE:
                raise RecipeError(
                    f"model.kl_weight compares the model with itself without its adapter, and this adapter changes it "
                    f"before it has trained (by {difference:.3g} nats a token): the reference would be no model that "
                    "you know; take an init of the adapter that begins as the base model does (init_lora_weights: "
                    "true), or set kl_weight to 0"
                )
    return reference
