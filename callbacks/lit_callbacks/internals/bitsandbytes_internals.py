"""Private API of bitsandbytes."""

from torch import nn


def without_repacking(model: nn.Module) -> None:
    """Keep 4-bit weights as they are: bitsandbytes repacks them in place in evaluation, on CPUs with AVX512-BF16.

    Repacked weights have scales in bf16, 0.2 % off. Training goes wrong with them, and a merge keeps the error.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
