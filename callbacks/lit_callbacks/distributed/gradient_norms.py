"""Gradient norms under any strategy: replicated, sharded or partly both."""

import math
from collections.abc import Sequence
from functools import reduce

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import FSDPStrategy
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lit_callbacks.distributed.gather import full_tensor
from lit_callbacks.either_package import is_a
from lit_callbacks.internals import torch_internals
from lit_callbacks.protocols import SumsGradientNorm


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Parameters of all groups of an optimizer."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def squared_norm(parameters: Sequence[Tensor], trainer: Trainer) -> Tensor:
    """This rank's summand of the squared norm of all gradients; the sum over all ranks is the squared norm.

    Args:
        parameters: this rank's parameters, each with a gradient.
        trainer: trainer of the run; its world size and strategy tell how many ranks hold the same gradient.

    Returns:
        Scalar, fp32.
    """
    # This runs over some hundred gradients in each step, with cold CPU caches: nothing is looked up twice.
    world_size, is_flat = trainer.world_size, is_a(trainer.strategy, FSDPStrategy)
    alike: dict[tuple[float, torch.device], list[Tensor]] = {}
    for parameter in parameters:
        assert parameter.grad is not None
        copies, local = _local_gradient(parameter.grad, world_size, is_flat)
        alike.setdefault((copies, local.device), []).append(local)
    squares = [_sum_of_squares(grads) / copies for (copies, _), grads in alike.items()]
    return reduce(lambda one, two: one + two.to(one.device), squares) if squares else torch.zeros(())


def _sum_of_squares(tensors: list[Tensor]) -> Tensor:
    norms = torch.stack(torch_internals.norms(tensors)).float()
    return norms.dot(norms)


def norms_by_name(trainer: Trainer, module: LightningModule, optimizer: Optimizer) -> dict[str, float]:
    """Gradient norm over all ranks of each parameter of an optimizer, by name; 0 without a gradient. A collective."""
    mine = {id(p) for p in parameters_of(optimizer)}
    named = {name: p for name, p in module.named_parameters() if id(p) in mine}
    if not named:
        return {}
    if isinstance(trainer.strategy, SumsGradientNorm):  # its ranks may hold different parameters
        return {name: float(full_tensor(p.grad).norm()) if p.grad is not None else 0.0 for name, p in named.items()}
    device = trainer.strategy.root_device
    squares = [squared_norm([p] if p.grad is not None else [], trainer).to(device) for p in named.values()]
    summed = trainer.strategy.reduce(torch.stack(squares), reduce_op="sum")
    return dict(zip(named, summed.sqrt().tolist(), strict=True))


def _local_gradient(grad: Tensor, world_size: int, is_flat: bool) -> tuple[float, Tensor]:
    """Number of ranks that hold the same part of a gradient, and this rank's part."""
    if isinstance(grad, DTensor):
        sizes = [grad.device_mesh.size(i) for i, how in enumerate(grad.placements) if not how.is_replicate()]
        return world_size / math.prod(sizes), grad.to_local()
    if is_flat:
        return 1.0, grad  # FSDP1: a shard of a flat parameter, as a plain tensor
    return float(world_size), grad.coalesce().values() if grad.is_sparse else grad
