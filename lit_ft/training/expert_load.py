"""Load of the experts of a mixture-of-experts model: how unevenly its routers distribute tokens."""

import re
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lit_ft.internals.transformers import GroupedExperts
from lit_ft.tuning.experts import ExpertLayer, expert_layers


class ExpertLoad(Metric):
    """Tokens of the busiest expert of a layer over the mean of its experts, for each layer; 1 where all are equal.

    Hooks before the experts count the tokens of training, on the device. With activation checkpointing a layer counts
    them twice, which does not change its ratio.
    """

    full_state_update = False
    counts: Tensor

    def __init__(self, layers: Sequence[ExpertLayer]) -> None:
        """Start counting.

        Args:
            layers: layers whose experts are called with the indices of each token's experts.
        """
        super().__init__()
        self.names = [f"layer_{re.findall(r'[0-9]+', layer.name)[0]}" for layer in layers]
        experts = max(layer.count for layer in layers)
        self.add_state("counts", torch.zeros(len(layers), experts, dtype=torch.int64), dist_reduce_fx="sum")
        self.experts = [layer.count for layer in layers]
        for place, layer in enumerate(layers):
            layer.module.register_forward_pre_hook(partial(self._before_experts, place), with_kwargs=True)

    @classmethod
    def of(cls, base: nn.Module) -> "ExpertLoad | None":
        """Load of a model's experts; None for a model without layers of which it is known."""
        layers = [layer for layer in expert_layers(base) if isinstance(layer.holder, GroupedExperts)]
        return cls(layers) if layers else None

    def _before_experts(
        self, place: int, experts: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]
    ) -> None:
        if experts.training:
            self.update(place, (*args, *kwargs.values())[1])

    def update(self, place: int, index: Tensor) -> None:
        """Count the tokens of a layer.

        Args:
            place: index of the layer.
            index: indices of each token's experts, ``(tokens, k)``.
        """
        chosen = index.flatten()
        self.counts[place].scatter_add_(0, chosen, torch.ones_like(chosen))  # bincount would wait for CUDA

    def compute(self) -> Tensor:
        """Ratio of each layer, ``(layers,)``, fp32; NaN without tokens."""
        experts = torch.tensor(self.experts, device=self.counts.device)
        return self.counts.amax(1) * experts / self.counts.sum(1)
