"""Metrics of distillation: the divergence from the teacher beside the loss."""

from typing import Literal

import torch
from torch import Tensor

from lit_ft.packed_batch import PackedBatch, TokenLoss
from lit_ft.training.metrics import StageMetrics, TokenMean


class DistillationMetrics(StageMetrics):
    """What ``StageMetrics`` measures, and the mean ``divergence`` from the teacher over the same tokens, in nats.

    Perplexity is that of the known answers: of training it is there where their cross-entropy has a part in the loss.
    """

    shown = ("divergence",)

    def __init__(self, has_router_loss: bool = False) -> None:
        super().__init__(has_router_loss)
        self.divergence = TokenMean()
        self.ratio = 0.0
        """Part of the divergence in the loss of the batches that were added."""

    def _add_further(
        self, result: TokenLoss, batch: PackedBatch
    ) -> tuple[Tensor, Literal["target_sources", "pair_sources"]]:
        self.ratio = batch["teacher_ratio"]
        self.divergence.update(result.loss_sum.new_zeros(()), 0)  # on ranks that compute no loss, too
        return super()._add_further(result, batch)

    def _further_means(self, loss: Tensor) -> dict[str, Tensor]:
        divergence = self.divergence.compute()
        means = {"divergence": divergence, "token_accuracy": self.token_accuracy.compute()}
        if self.ratio == 1:
            return means
        known = (loss - self.ratio * divergence) / (1 - self.ratio)
        return {**means, **({"cross_entropy": known} if self.ratio else {}), "perplexity": torch.exp(known)}
