"""Norm of all gradients, computed once per optimizer step, and gradient clipping by it."""

from collections.abc import Callable, Sequence

import torch
from lit_callbacks.internals.torch_internals import norms as norms_of
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lit_ft.internals import torch as torch_internals

Measure = Callable[[Sequence[nn.Parameter]], Tensor | None]
"""Function from parameters with gradients to the norm of their gradients, a scalar."""


def local(tensor: Tensor) -> Tensor:
    """Local shard of a DTensor; any other tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def norms(gradients: list[Tensor]) -> Tensor:
    """Norm of each gradient, ``(gradients,)``, computed in fp32 (fp64 for fp64); all gradients are on one device."""
    return torch.stack(norms_of(gradients)) if gradients else torch.zeros(0)


def with_gradients(optimizer: Optimizer) -> list[nn.Parameter]:
    """Parameters of an optimizer that have a gradient."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def gradient_norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Norm of the gradients of all parameters, on a rank that holds all of them in full."""
    return norms([p.grad for p in parameters if p.grad is not None]).norm()


def clip(parameters: Sequence[nn.Parameter], norm: Tensor, max_norm: float) -> None:
    """Scale gradients down if ``norm`` is over ``max_norm``, like ``torch.nn.utils.clip_grad_norm_``."""
    if pieces := [local(p.grad) for p in parameters if p.grad is not None]:
        torch_internals.scale(pieces, (max_norm / (norm + 1e-6)).clamp(max=1.0).to(pieces[0].device))


class GradientNorm:
    """Cache of the norm of an optimizer's gradients, which is computed again once a gradient has changed."""

    def __init__(self) -> None:
        """Start with an empty cache."""
        self.forget()

    def forget(self) -> None:
        """Drop the cached norm and the gradients, at the end of an optimizer step."""
        self._gradients: list[Tensor] = []
        self._state: list[int] | None = None
        self._norm: Tensor | None = None

    def of(self, optimizer: Optimizer, measure: Measure) -> Tensor | None:
        """Norm of the optimizer's gradients; a collective where ``measure`` is one, so call it on all ranks or none."""
        every: list[Tensor | None] = [p.grad for group in optimizer.param_groups for p in group["params"]]
        gradients = [grad for grad in every if grad is not None]
        # The gradients are kept so that their ids stay unique; a DTensor and its shard have versions of their own.
        parts = [g.to_local() for g in gradients if isinstance(g, DTensor)]
        state = [*map(id, gradients), *map(torch_internals.version_of, [*gradients, *parts])]
        if state != self._state:
            self._gradients, self._state, self._norm = gradients, state, measure(with_gradients(optimizer))
        return self._norm

    def before_removal(self, optimizer: Optimizer) -> Tensor | None:
        """Norm that was measured in this step, if all gradients have been removed since, as by ``SpikeGuard``."""
        has_gradients = any(p.grad is not None for group in optimizer.param_groups for p in group["params"])
        return self._norm if self._gradients and not has_gradients else None
