"""Operators of a decoder layer: none is added without anyone noticing, and fused LoRA needs fewer than PEFT."""

import torch

from benchmarks.speed.operator_counts import Operators, counts


def test_views_and_allocations_are_not_counted() -> None:
    x = torch.ones(3, 4)
    with Operators() as operators:
        y = (x.view(4, 3).t() + 1).detach()
        torch.empty(3)
        y.add_(1)
    assert operators.counts == {"add": 1, "add_": 1}


def test_a_layer_s_operators_are_bounded() -> None:
    """As docs/performance.md has them; other versions of torch and transformers may need a few more or less."""
    folder = "checkpoints/tiny-qwen2"
    frozen, plain, fused = (counts(folder, way, "all-linear").total() for way in ("none", "PEFT", "fused_lora"))
    on_a_cpu = 2 * (7 + 4)  # casts to float32 of two operands, for B of seven layers and A of four inputs; none on CUDA
    assert frozen <= 110
    assert fused - on_a_cpu - frozen <= 78
    assert fused < plain <= 230
