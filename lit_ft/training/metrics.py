"""Metrics that average a quantity over supervised tokens."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torchmetrics import Metric


class TokenMean(Metric):
    """Mean of a quantity per token, over all batches and ranks.

    Not ``torchmetrics.MeanMetric``: by default that leaves NaN out of the mean, so that a diverged run
    looks healthy, and with ``nan_strategy="disable"`` (1.9.0) it ignores the weights.

    The sum is accumulated in fp64 (fp32 on MPS, which has no fp64) and tokens in int64, whatever dtype the module is
    cast to: precision ``bf16-true`` and DeepSpeed cast everything in it, and bf16 counts no further than 256.
    """

    full_state_update = False
    total: Tensor
    tokens: Tensor

    def __init__(self) -> None:
        super().__init__()
        self._add_states(())

    def _add_states(self, shape: tuple[int, ...]) -> None:
        self.add_state("total", default=torch.zeros(shape, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("tokens", default=torch.zeros(shape, dtype=torch.int64), dist_reduce_fx="sum")

    def _apply(self, fn: Callable[[Tensor], Tensor], exclude_state: Sequence[str] = "") -> nn.Module:
        def move(tensor: Tensor) -> Tensor:
            """Move to another device, but keep the dtype."""
            device = fn(torch.zeros(0, device=tensor.device)).device
            is_fp64_on_mps = tensor.dtype == torch.float64 and device.type == "mps"
            return tensor.to(device, torch.float32 if is_fp64_on_mps else tensor.dtype)

        return super()._apply(move, exclude_state)

    def update(self, total: Tensor, tokens: int | Tensor) -> None:
        """Add a batch: the quantity's sum over ``tokens`` tokens."""
        self.total += total.detach()
        self.tokens += tokens

    def compute(self) -> Tensor:
        """Mean per token, scalar fp32; NaN when there was no token."""
        return (self.total / self.tokens).float()


class SourceMeans(TokenMean):
    """Mean of a quantity per token for each of several sources, reduced over ranks together."""

    def __init__(self, names: Sequence[str]) -> None:
        """Start with zero tokens.

        Args:
            names: names of the sources.
        """
        Metric.__init__(self)
        self.names = tuple(names)
        self._add_states((len(names),))

    def update(self, per_token: Tensor, of_token: Tensor) -> None:  # type: ignore[override]
        """Add a batch.

        Args:
            per_token: quantity of each token, ``(n,)``.
            of_token: source of each token as an index into ``names``, ``(n,)``, int64.
        """
        self.total.index_add_(0, of_token, per_token.to(self.total.dtype))
        self.tokens.index_add_(0, of_token, torch.ones_like(of_token))

    def compute(self) -> dict[str, Tensor]:  # type: ignore[override]
        """Mean per token, scalar fp32, of each source that had tokens."""
        means = (self.total / self.tokens).float()
        return {name: means[i] for i, name in enumerate(self.names) if self.tokens[i] > 0}
