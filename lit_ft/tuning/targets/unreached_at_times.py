"""Weights that some batches do not reach: their gradient is 0 there.

They would have no gradient at all, and ranks that sum gradients would disagree on those there are: they hang or crash.
Parts of a model that no batch reaches: ``targets.unreached``.
"""

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from lit_ft.gradient_norm import local


@runtime_checkable
class _IdentityExperts(Protocol):
    """Experts of a layer, those without weights last, as LongCat-Flash has them; tokens may reach no others.

    Its weights are left out: from Python 3.12 on, ``isinstance`` finds no parameters of a module.
    """

    num_routed_experts: int
    """Number of experts with weights."""
    zero_expert_num: int


@runtime_checkable
class _Compressor(Protocol):
    """Compression of every ``compress_rate`` tokens to one key, as DeepSeek-V4 has it; shorter samples have none."""

    compress_rate: int
    head_dim: int


def give_a_gradient(model: nn.Module) -> None:
    """Make the weights of experts and compressors part of every forward pass.

    Args:
        model: model, changed in place.
    """
    for module in model.modules():
        if isinstance(module, _IdentityExperts) and module.zero_expert_num:
            module.register_forward_hook(_reach_experts)
        elif isinstance(module, _Compressor):
            module.register_forward_hook(_reach_compressor)


def unreached(model: nn.Module) -> list[str]:
    """Names of the trained weights of experts and compressors that a step has not reached: all gradients there are 0.

    Not those of LoRA on fused experts, which is around them.

    Args:
        model: model with gradients, or the shards of them that are on this rank.
    """
    names: list[str] = []
    for prefix, module in model.named_modules():
        if _may_be_unreached(module):
            trained = {name: p.grad for name, p in module.named_parameters(prefix) if p.requires_grad}
            found = [local(gradient) for gradient in trained.values() if gradient is not None]
            names += trained if found and not any(bool(gradient.any()) for gradient in found) else ()
    return names


def _may_be_unreached(module: nn.Module) -> bool:
    return isinstance(module, _IdentityExperts | _Compressor)


def _reach_experts(experts: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
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


def _reach_compressor(compressor: nn.Module, arguments: tuple[Tensor, ...], output: object) -> object:
    """Output of a compressor; to that without keys, 0 times what its weights make of one token is added.

    Args:
        compressor: module with the projections of keys and their gates, or an indexer like it, which trains nothing.
        arguments: hidden states ``(1, T, H)`` and others.
        output: keys ``(1, 1, T // compress_rate, D)`` and a mask, or tokens that an indexer chose.
    """
    if not isinstance(output, tuple) or output[0].numel() or not torch.is_grad_enabled():
        return output
    assert isinstance(compressor, _Compressor)
    keys, *rest = output
    token, no_key = arguments[0][:, :1], keys.new_zeros(1, compressor.head_dim)
    calls = (compressor.kv_proj, token), (compressor.gate_proj, token), (compressor.kv_norm, no_key)
    results = [module(inputs) for module, inputs in calls if isinstance(module, nn.Module)]
    for part in (*results, compressor.position_bias):
        assert isinstance(part, Tensor)
        keys = keys + 0 * part.sum()
    return keys, *rest
