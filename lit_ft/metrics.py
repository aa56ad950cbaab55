"""Means over supervised tokens."""

import torch
from torch import Tensor
from torchmetrics import Metric


class TokenMean(Metric):
    """Sum of a quantity over its tokens' number, over batches and ranks.

    Not ``torchmetrics.MeanMetric``: by default that leaves NaN out of the mean, so that a diverged run
    looks healthy, and with ``nan_strategy="disable"`` (1.9.0) it ignores the weights.
    """

    full_state_update = False
    total: Tensor
    tokens: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", default=torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("tokens", default=torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, total: Tensor, tokens: int) -> None:
        """Add a batch: the quantity's sum (scalar) over ``tokens`` tokens."""
        self.total += total.detach()
        self.tokens += tokens

    def compute(self) -> Tensor:
        """Mean per token, scalar fp32; NaN when there was no token."""
        return self.total / self.tokens
