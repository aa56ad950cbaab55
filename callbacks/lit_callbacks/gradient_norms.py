"""Norms of gradients, however a strategy has laid them over the ranks."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import FSDPStrategy
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from lit_callbacks.gather import whole_tensor


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """An optimizer's parameters, of all its groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def squared_norm(parameters: Sequence[Tensor], trainer: Trainer) -> Tensor:
    """This rank's share of the squared norm of all gradients: the shares of all ranks add up to it.

    Args:
        parameters: with a gradient each.
        trainer: knows how many ranks hold the same gradient.

    Returns:
        Scalar, fp32.
    """
    by_copies: dict[float, list[Tensor]] = {}
    for parameter in parameters:
        copies, local = _local_gradient(parameter, trainer)
        by_copies.setdefault(copies, []).append(local)
    squares = [get_total_norm(grads).float() ** 2 / copies for copies, grads in by_copies.items()]
    return torch.stack([s.to(squares[0].device) for s in squares]).sum() if squares else torch.zeros(())


def norms_by_name(trainer: Trainer, module: LightningModule, optimizer: Optimizer) -> dict[str, float]:
    """Norm of each gradient of the optimizer's parameters here, over all ranks; 0 where there is none. A collective."""
    mine = {id(p) for p in parameters_of(optimizer)}
    named = {name: p for name, p in module.named_parameters() if id(p) in mine}
    if not named:
        return {}
    if hasattr(trainer.strategy, "clip_gradients_by_norm"):  # its ranks may hold different parameters
        return {name: float(whole_tensor(p.grad).norm()) if p.grad is not None else 0.0 for name, p in named.items()}
    device = trainer.strategy.root_device
    squares = [squared_norm([p] if p.grad is not None else [], trainer).to(device) for p in named.values()]
    summed: Any = trainer.strategy.reduce(torch.stack(squares), reduce_op="sum")
    return dict(zip(named, summed.sqrt().tolist(), strict=True))


def _local_gradient(parameter: Tensor, trainer: Trainer) -> tuple[float, Tensor]:
    """How many ranks hold the same part of a gradient, and this rank's part."""
    grad: Any = parameter.grad
    if isinstance(grad, DTensor):
        sizes = [grad.device_mesh.size(i) for i, place in enumerate(grad.placements) if not place.is_replicate()]
        return trainer.world_size / math.prod(sizes), grad.to_local()
    if isinstance(trainer.strategy, FSDPStrategy):
        return 1.0, grad  # FSDP1: a flat shard, a plain tensor
    return float(trainer.world_size), grad.coalesce().values() if grad.is_sparse else grad
