"""Full weights of a model that a strategy has sharded."""

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

Wanted = Callable[[str, Tensor], bool]


def full_tensor(tensor: Tensor) -> Tensor:
    """Full value of a tensor that may be sharded (FSDP2 and tensor parallelism by ``DTensor``, ZeRO-3 by DeepSpeed).

    A collective where it is sharded: every rank calls it, for the same tensors in the same order.
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
    """Number of elements of a parameter, those on other ranks included."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def whole_weights(module: nn.Module, wanted: Wanted = lambda *_: True, keep: bool = True) -> dict[str, Tensor]:
    """Full parameters and persistent buffers of a module by name, on the CPU; a collective where weights are sharded.

    One tensor is gathered at a time, so that a rank holds little more than what it keeps.

    Args:
        module: module whose weights are gathered.
        wanted: filter by name and tensor, the same on every rank. Buffers never require gradients.
        keep: whether this rank gets the result; ``{}`` if not.
    """
    found: dict[str, Tensor] = {}
    for name, weight in chain(module.named_parameters(remove_duplicate=False), persistent_buffers(module)):
        if wanted(name, weight):
            whole = full_tensor(weight)
            if keep:
                found[name] = whole.cpu().clone() if whole.data_ptr() == _address(weight) else whole.cpu()
    return found


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Names and values of the buffers in a module's ``state_dict``, e.g. the router bias of DeepSeek-V3.

    Every rank has them in full, whatever shards its parameters.
    """
    for path, part in module.named_modules(remove_duplicate=False):
        for name, buffer in part.named_buffers(recurse=False, remove_duplicate=False):
            if name not in part._non_persistent_buffers_set:  # torch has no public way to ask for this
                yield f"{path}.{name}" if path else name, buffer


def reshard(module: nn.Module) -> None:
    """Free the full weights that FSDP2 keeps after a forward pass without a backward pass, so that only shards remain.

    Every rank calls it before weights are read: a rank that reshards alone waits forever for the shards of the others.
    """
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def is_split(module: nn.Module) -> bool:
    """Whether a module's weights are sharded."""
    return any(isinstance(p, DTensor) or hasattr(p, "ds_id") for p in module.parameters())


def _address(tensor: Any) -> int:
    return -1 if isinstance(tensor, DTensor) or hasattr(tensor, "ds_id") else tensor.data_ptr()
