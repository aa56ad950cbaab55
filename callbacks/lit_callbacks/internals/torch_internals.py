"""Private API of torch."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import Store, distributed_c10d
from torch.nn.modules.batchnorm import _NormBase as NormBase
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

__all__ = [
    "NormBase",
    "TorchDispatchMode",
    "connect_to_default_store",
    "copy_all",
    "dump_memory_snapshot",
    "is_persistent",
    "is_traceable_wrapper_subclass",
    "norms",
    "record_memory_history",
    "unscales_gradients_itself",
]


def connect_to_default_store() -> tuple[Store, float]:
    """New connection to the store of the default process group, and the group's timeout in seconds.

    torch has no public access to the store of an existing process group, and does not declare these attributes of it.
    """
    store: Any = distributed_c10d._get_default_store()
    return store.clone(), store.timeout.total_seconds()


def norms(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """2-norm of each tensor, computed together in fp32, or in fp64 where one of them is.

    torch's public ``get_total_norm`` takes twice as long, rounds the norm of bf16 to 8 bits, and gives infinity for one
    of fp16 from 65,520 on.
    """
    parts = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]
    has_double = any(part.dtype == torch.float64 for part in parts)
    return tuple(torch._foreach_norm(parts, dtype=torch.float64 if has_double else torch.float32))


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target, together: a copy each would take a kernel's start each."""
    torch._foreach_copy_(list(targets), list(sources))


def is_persistent(module: nn.Module, buffer: str) -> bool:
    """Whether a buffer of a module itself, given by name, is in its ``state_dict``."""
    return buffer not in module._non_persistent_buffers_set


def unscales_gradients_itself(optimizer: Optimizer) -> bool:
    """Whether an optimizer, given a gradient scaler, unscales the gradients in its own kernel: a fused one."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def record_memory_history() -> None:
    """Record the origin of each allocation on CUDA; documented, in spite of its name."""
    torch.cuda.memory._record_memory_history()


def dump_memory_snapshot(path: str) -> None:
    """Write CUDA's memory snapshot; documented, in spite of its name."""
    torch.cuda.memory._dump_snapshot(path)
