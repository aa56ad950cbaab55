"""Experts without weights (LongCat-Flash): where tokens reach no others, the gradient of the others is 0.

They would have no gradient at all, and ranks that sum gradients would disagree on those there are: they hang or crash.
"""

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn


@runtime_checkable
class _IdentityExperts(Protocol):
    """Experts of a layer, those without weights last, as transformers' class has them.

    Its weights are left out: from Python 3.12 on, ``isinstance`` finds no parameters of a module.
    """

    num_routed_experts: int
    """Number of experts with weights."""
    zero_expert_num: int


def give_others_a_gradient(model: nn.Module) -> None:
    """Make the weights of a model's experts part of every forward pass.

    Args:
        model: model, changed in place.
    """
    for module in model.modules():
        if isinstance(module, _IdentityExperts) and module.zero_expert_num:
            module.register_forward_hook(_reach)


def _reach(experts: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """Output of a layer's experts; to that of identity experts alone, 0 times a weight of each tensor is added.

    Args:
        experts: module of experts, those with weights first.
        arguments: hidden states ``(T, H)``, each token's experts ``(T, k)`` and their weights ``(T, k)``.
        output: hidden states ``(T, H)``.
    """
    assert isinstance(experts, _IdentityExperts), "they have this hook"
    if not torch.is_grad_enabled() or bool((arguments[1] < experts.num_routed_experts).any()):
        return output
    for weight in (experts.gate_up_proj, experts.down_proj):
        assert isinstance(weight, Tensor)
        output = output + 0 * weight.flatten()[0]
    return output
