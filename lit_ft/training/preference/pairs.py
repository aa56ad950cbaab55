"""Log-probabilities and loss of the pairs of a packed batch, from the cross-entropy of its supervised tokens."""

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lit_callbacks.widest_float import widest_float
from torch import Tensor

from lit_ft.packed_batch import PackedBatch
from lit_ft.training.loss.token_cross_entropy import LossOf
from lit_ft.training.preference.objectives import AnswerLogProbs, Objective


def with_reference(
    batch: PackedBatch, log_probs: Tensor | None = None, divergence: Tensor | None = None
) -> PackedBatch:
    """A batch of pairs with log-probabilities of the reference, ``(P, 2)``, and the divergence; None stands for 0."""
    zeros = torch.zeros(len(batch["pairs"]), 2, device=batch["pairs"].device)
    return {
        **batch,
        "reference_log_probs": zeros if log_probs is None else log_probs,
        "divergence": zeros.new_zeros(()) if divergence is None else divergence,
    }


def answer_log_probs(per_token: Tensor, batch: PackedBatch) -> tuple[AnswerLogProbs, AnswerLogProbs]:
    """Log-probabilities of the chosen and of the rejected answers of a batch's P pairs.

    Args:
        per_token: cross-entropy of each of the n supervised tokens, ``(n,)``.
        batch: packed batch of pairs with ``reference_log_probs``.
    """
    answer, count = batch["target_answers"], 2 * len(batch["pairs"])
    # In fp64, so that the order in which a GPU adds does not count.
    wide = widest_float(per_token.device)
    sums = per_token.new_zeros(count, dtype=wide).index_add(0, answer, per_token.to(wide))
    tokens = per_token.new_zeros(count).index_add(0, answer, torch.ones_like(per_token)).view(-1, 2)
    reference, divergence = batch["reference_log_probs"], batch["divergence"].expand(len(batch["pairs"]))
    # So that an answer that is missing has become as probable as the divergence says of any.
    policy = torch.where(tokens > 0, -sums.to(per_token.dtype).view(-1, 2), divergence[:, None])
    chosen, rejected = (AnswerLogProbs(policy[:, k], reference[:, k], tokens[:, k], divergence) for k in (0, 1))
    return chosen, rejected


def mismatched_log_probs(module: LightningModule, batches: Iterable[PackedBatch]) -> Iterator[tuple[Tensor, Tensor]]:
    """Indices ``(P,)`` of pairs, and log-probabilities ``(P,)`` of answers to other prompts, of each of some batches.

    Args:
        module: module whose forward pass gives the loss of a packed batch, in evaluation mode and without gradients.
        batches: those of ``window_mismatched``.
    """
    for batch in map(with_reference, batches):
        answer, _ = answer_log_probs(module(batch).per_token, batch)
        yield batch["pairs"], answer.policy


def loss_of_pairs(objective: Objective, batch: PackedBatch) -> LossOf:
    """Summed loss of a batch's pairs, as a function of the cross-entropy of the tokens on this rank."""

    def loss_of(per_token: Tensor, has_gradient: bool) -> tuple[Tensor, Tensor | None]:
        with torch.set_grad_enabled(has_gradient):
            every = _of_all_ranks(per_token, batch).requires_grad_(has_gradient)
            loss = objective.losses(*answer_log_probs(every, batch)).sum()
            if not has_gradient:
                return loss, None
            (weights,) = torch.autograd.grad(loss, every)
        return loss.detach(), weights[batch["is_local"]] if "is_local" in batch else weights

    return loss_of


def loss_before_training(objective: Objective, batch: PackedBatch) -> LossOf:
    """``loss_of_pairs`` of a model that is its own reference, as it is when a run begins."""

    def loss_of(per_token: Tensor, has_gradient: bool) -> tuple[Tensor, Tensor | None]:
        answers = answer_log_probs(per_token.detach(), with_reference(batch))
        own = torch.stack([answer.policy for answer in answers], dim=1)
        return loss_of_pairs(objective, with_reference(batch, own))(per_token, has_gradient)

    return loss_of


def _of_all_ranks(per_token: Tensor, batch: PackedBatch) -> Tensor:
    """Cross-entropy of all supervised tokens of a batch, whose tokens may be sharded across ranks; a collective."""
    if "is_local" not in batch:
        return per_token.detach()
    every = per_token.new_zeros(len(batch["is_local"]))
    every[batch["is_local"]] = per_token.detach()
    dist.all_reduce(every, group=batch["token_group"])
    return every
