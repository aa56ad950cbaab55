"""Means over supervised tokens."""

from collections.abc import Sequence

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
        self._add_states(torch.tensor(0.0))

    def _add_states(self, zeros: Tensor) -> None:
        self.add_state("total", default=zeros, dist_reduce_fx="sum")
        self.add_state("tokens", default=zeros.clone(), dist_reduce_fx="sum")

    def update(self, total: Tensor, tokens: int | Tensor) -> None:
        """Add a batch: the quantity's sum over ``tokens`` tokens."""
        self.total += total.detach()
        self.tokens += tokens

    def compute(self) -> Tensor:
        """Mean per token, scalar fp32; NaN when there was no token."""
        return self.total / self.tokens


class SourceMeans(TokenMean):
    """The same for each of several sources, reduced over ranks at once."""

    def __init__(self, names: Sequence[str]) -> None:
        """Start empty.

        Args:
            names: of the sources.
        """
        Metric.__init__(self)
        self.names = tuple(names)
        self._add_states(torch.zeros(len(names)))

    def update(self, per_token: Tensor, of_token: Tensor) -> None:  # type: ignore[override]
        """Add a batch.

        Args:
            per_token: the quantity, ``(n,)``.
            of_token: each token's source, ``(n,)``, as a place in ``names``.
        """
        self.total.index_add_(0, of_token, per_token)
        self.tokens.index_add_(0, of_token, torch.ones_like(per_token))

    def compute(self) -> dict[str, Tensor]:  # type: ignore[override]
        """Mean per token, scalar fp32, of each source that had tokens."""
        means = self.total / self.tokens
        return {name: means[i] for i, name in enumerate(self.names) if self.tokens[i] > 0}
