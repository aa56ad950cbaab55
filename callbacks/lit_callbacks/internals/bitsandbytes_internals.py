"""Private API of bitsandbytes."""

from functools import cache
from typing import Any

from torch import Tensor, nn


def without_faults(model: nn.Module) -> None:
    """Let bitsandbytes' layers compute in evaluation what they compute in training; other layers stay as they are.

    On CPUs with AVX512-BF16 it repacks 4-bit weights in place. Repacked weights have scales in bf16, 0.2 % off:
    training goes wrong with them, and a merge keeps the error. Kernels of 8-bit layers take matrices: bitsandbytes
    (0.50) makes one of inputs of three dimensions, but not of the four that latent attention has. Of 8-bit layers that
    share a weight (Zamba2) the first takes its scales, and the others would compute without them.
    """
    states: dict[Tensor, Any] = {}
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
        if hasattr(module, "init_8bit_state") and not isinstance(module, _OfAnyShape):
            kind: Any = type(module)
            module.__class__ = _of_any_shape(kind)
        if isinstance(module, _OfAnyShape):
            module.state = states.setdefault(module.weight, module.state)


class _OfAnyShape:
    """Part of a class of 8-bit layers that makes a matrix of its inputs, ``(..., I)``."""

    weight: Tensor
    state: Any
    """Weight and scales in the first layer's call, and what bitsandbytes keeps for the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x.reshape(-1, x.shape[-1]))  # type: ignore[misc]
        return out.view(*x.shape[:-1], out.shape[-1])


@cache
def _of_any_shape(layer_class: Any) -> type[nn.Module]:
    return type(layer_class.__name__, (_OfAnyShape, layer_class), {})


def keep_scales(model: nn.Module) -> None:
    """Keep the scales of 8-bit weights on a CPU, where PEFT moves dequantized weights back and so loses them (DoRA)."""
    for module in model.modules():
        if hasattr(module, "init_8bit_state"):
            module.register_forward_pre_hook(_give_back_scales)


def _give_back_scales(module: Any, inputs: tuple[Any, ...]) -> None:
    if module.weight.CB is not None and module.weight.SCB is None:
        module.weight.SCB = module.state.SCB
