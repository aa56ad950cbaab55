"""Whole weights of a model that a strategy has split over ranks."""

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

Wanted = Callable[[str, Tensor], bool]


def full_tensor(tensor: Tensor) -> Tensor:
    """All of a tensor that is split over ranks (FSDP2 and tensor parallelism by ``DTensor``, ZeRO-3 by DeepSpeed).

    A collective where it is split: every rank calls it, for the same tensors in the same order.
    """
    if isinstance(tensor, DTensor):
        device = tensor.device_mesh.device_type
        on_mesh: Any = tensor if tensor.device.type == device else tensor.to(device)
        return on_mesh.full_tensor().detach()
    if hasattr(tensor, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([tensor]):
            return tensor.detach().clone()
    return tensor.detach()


def whole_numel(parameter: Tensor) -> int:
    """How many weights a parameter has, those on other ranks included."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def whole_weights(module: nn.Module, wanted: Wanted = lambda *_: True, keep: bool = True) -> dict[str, Tensor]:
    """A module's parameters and persistent buffers by name, whole, on the CPU; one at a time, so that no rank holds
    more than it keeps.

    A collective where weights are split.

    Args:
        module: any.
        wanted: which of them; the same on every rank. Buffers never require gradients.
        keep: whether this rank wants the result; ``{}`` elsewhere.
    """
    found: dict[str, Tensor] = {}
    for name, weight in chain(module.named_parameters(remove_duplicate=False), persistent_buffers(module)):
        if wanted(name, weight):
            whole = full_tensor(weight)
            if keep:
                found[name] = whole.cpu().clone() if whole.data_ptr() == _address(weight) else whole.cpu()
    return found


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Names and values of the buffers that belong to a module's ``state_dict``: DeepSeek-V3's bias of its router, say.

    Each rank has them whole, whatever splits its parameters.
    """
    for path, part in module.named_modules(remove_duplicate=False):
        for name, buffer in part.named_buffers(recurse=False, remove_duplicate=False):
            if name not in part._non_persistent_buffers_set:  # torch has no public way to ask
                yield f"{path}.{name}" if path else name, buffer


def reshard(module: nn.Module) -> None:
    """Leave each rank its shards only, where FSDP2 kept whole weights after a forward pass without a backward one.

    Every rank calls it before weights are looked at: a rank that lets go of them alone waits for the others' for ever.
    """
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def is_split(module: nn.Module) -> bool:
    """Whether some of a module's weights are on other ranks."""
    return any(isinstance(p, DTensor) or hasattr(p, "ds_id") for p in module.parameters())


def _address(tensor: Any) -> int:
    return -1 if isinstance(tensor, DTensor) or hasattr(tensor, "ds_id") else tensor.data_ptr()
