"""Sum or maximum over all ranks that does not make the host wait for a GPU."""

from typing import Literal

import torch
from lightning.pytorch import Trainer
from torch import Tensor, distributed

_OPERATIONS = {"sum": distributed.ReduceOp.SUM, "max": distributed.ReduceOp.MAX} if distributed.is_available() else {}


def all_reduce(trainer: Trainer, tensor: Tensor, operation: Literal["sum", "max"]) -> Tensor:
    """Reduce a tensor over all ranks of a run; a collective.

    ``strategy.reduce`` begins with a barrier, in which the host waits until a GPU has done all that was queued: NCCL
    blocks it there. The reduction itself is queued, and orders the ranks as well.

    Args:
        trainer: trainer of the run.
        tensor: tensor of the same shape on every rank, on the device of the run; changed in place.
        operation: what is computed of the ranks' values.
    """
    if distributed.is_available() and distributed.is_initialized():
        distributed.all_reduce(tensor, op=_OPERATIONS[operation])
        return tensor
    return torch.as_tensor(trainer.strategy.reduce(tensor, reduce_op=operation))
