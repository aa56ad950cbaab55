"""Private API of bitsandbytes."""

from typing import Any

from torch import nn


def without_repacking(model: nn.Module) -> None:
    """Keep 4-bit weights as they are: bitsandbytes repacks them in place in evaluation, on CPUs with AVX512-BF16.

    Repacked weights have scales in bf16, 0.2 % off. Training goes wrong with them, and a merge keeps the error.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]


def keep_scales(model: nn.Module) -> None:
    """Keep the scales of 8-bit weights on a CPU, where PEFT moves dequantized weights back and so loses them (DoRA)."""
    for module in model.modules():
        if hasattr(module, "init_8bit_state"):
            module.register_forward_pre_hook(_give_back_scales)


def _give_back_scales(module: Any, inputs: tuple[Any, ...]) -> None:
    if module.weight.CB is not None and module.weight.SCB is None:
        module.weight.SCB = module.state.SCB
