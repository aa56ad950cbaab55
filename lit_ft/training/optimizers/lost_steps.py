"""Optimizer steps that are lost because a weight in half precision is too large for them."""

from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch.strategies import DeepSpeedStrategy, Strategy
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lit_ft.gradient_norm import local

MOST_LOST = 0.5
"""Share of the weights in half precision from which a line says so: below, the larger part of training arrives."""


_OF_BOUNDED_STEPS = {"betas", "beta2_decay", "ns_steps", "initial_accumulator_value"}
"""Options of the optimizers that divide gradients by their own size: Adam and Lion, Adafactor, Muon, Adagrad."""


def warn_of_lost_steps(optimizer: Optimizer, strategy: Strategy) -> None:
    """Warn if most weights in half precision are rounded back after a step, as in full fine-tuning in bfloat16.

    DeepSpeed steps copies in float32. A pipeline's stage and a rank of sharded weights speak of their part.
    """
    if isinstance(strategy, DeepSpeedStrategy):
        return
    lost = total = 0
    for weight, rate in _in_half_precision(optimizer):
        lost += int((weight.abs().float() * _least_step(weight.dtype) > rate).sum())
        total += weight.numel()
    if total and lost / total > MOST_LOST:
        rate = max(map(_largest_rate, optimizer.param_groups))
        rank_zero_warn(
            f"{lost / total:.0%} of the weights that train in half precision are too large for a step of "
            f"optimizer.lr={rate:g}, and are rounded back to what they were: they hardly learn; set "
            "model.dtype=float32, with trainer.precision=bf16-mixed where bfloat16 is faster"
        )


def _least_step(dtype: torch.dtype) -> float:
    """Step, relative to a weight, below which the sum is always rounded back: half of its finest spacing."""
    return torch.finfo(dtype).eps / 4


def _in_half_precision(optimizer: Optimizer) -> Iterator[tuple[Tensor, float]]:
    """Weights whose steps are at most about the learning rate, each with its rate."""
    for group in optimizer.param_groups:
        for parameter in group["params"] if _OF_BOUNDED_STEPS & group.keys() else ():
            if parameter.dtype in (torch.bfloat16, torch.float16):
                yield local(parameter.detach()), _largest_rate(group)


def _largest_rate(group: dict[str, Any]) -> float:
    """Largest learning rate of a group during the run, as far as a schedule, which may begin at 0, says it."""
    return max(float(group[name]) for name in ("lr", "initial_lr", "max_lr") if name in group)
