"""Gradients as a whole: their norm, measured once a step, and clipping by it."""

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

_VERSION = attrgetter("_version")

Measure = Callable[[Sequence[nn.Parameter]], Tensor | None]
"""From parameters that have gradients to the norm of these, a scalar."""


def local(tensor: Any) -> Tensor:
    """What this rank has of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def norms(gradients: list[Tensor]) -> Tensor:
    """Norm of each, ``(gradients,)``, fp32, and in fp32 also where they are of less; on one device."""
    # As torch.nn.utils.get_total_norm does it; that takes twice as long, and rounds the norm of bf16 to 8 bits.
    return torch.stack(torch._foreach_norm(gradients, dtype=torch.float32)) if gradients else torch.zeros(0)


def with_gradients(optimizer: Optimizer) -> list[nn.Parameter]:
    """An optimizer's parameters that have a gradient now."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def gradient_norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Norm of the gradients of all parameters, on a rank that holds all of them whole."""
    return norms([p.grad for p in parameters if p.grad is not None]).norm()


def clip(parameters: Sequence[nn.Parameter], norm: Tensor, max_norm: float) -> None:
    """Scale gradients down, as ``torch.nn.utils.clip_grad_norm_`` does, if ``norm`` is over ``max_norm``."""
    if pieces := [local(p.grad) for p in parameters if p.grad is not None]:
        torch._foreach_mul_(pieces, (max_norm / (norm + 1e-6)).clamp(max=1.0).to(pieces[0].device))


class GradientNorm:
    """The norm of an optimizer's gradients: measured for who asks first, and again once a gradient has changed."""

    def __init__(self) -> None:
        """Start with nothing."""
        self.forget()

    def forget(self) -> None:
        """The step is over; its gradients are let go."""
        self._gradients: list[Tensor] = []
        self._state: list[int] | None = None
        self._norm: Tensor | None = None

    def of(self, optimizer: Optimizer, measure: Measure) -> Tensor | None:
        """The norm; a collective where ``measure`` is one, and then on every rank or on none."""
        every: list[Any] = [p.grad for group in optimizer.param_groups for p in group["params"]]
        gradients = [grad for grad in every if grad is not None]
        # Held while their ids count; a DTensor and its part on this rank can each be changed past the other.
        parts = [g.to_local() for g in gradients if isinstance(g, DTensor)]
        state = [*map(id, gradients), *map(_VERSION, gradients), *map(_VERSION, parts)]
        if state != self._state:
            self._gradients, self._state, self._norm = gradients, state, measure(with_gradients(optimizer))
        return self._norm
