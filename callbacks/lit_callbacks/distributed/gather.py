"""Full weights of a model that a strategy has sharded."""

from collections.abc import Callable, Iterator
from itertools import chain
from typing import TypeGuard, cast

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lit_callbacks.internals.torch_internals import is_persistent
from lit_callbacks.protocols import WeightFilter


class Zero3Parameter(nn.Parameter):
    """Type of a parameter that ZeRO-3 shards: a plain one, empty on every rank, with attributes that DeepSpeed adds."""

    ds_id: int
    ds_numel: int
    """Number of elements on all ranks."""
    ds_shape: tuple[int, ...]
    """Shape of the full parameter."""
    ds_tensor: Tensor
    """This rank's part."""
    ds_zero_partition_rank: int
    """Index of this rank among those that share the parameter."""
    partition_numel: Callable[[], int]
    """Returns the number of elements of a rank's part."""


def is_zero3(tensor: Tensor) -> TypeGuard[Zero3Parameter]:
    """Whether a tensor is a parameter that ZeRO-3 shards."""
    return hasattr(tensor, "ds_id")


def part_of_zero3(tensor: Zero3Parameter) -> Tensor:
    """This rank's part, ``(elements,)``, without what DeepSpeed appends to make all as long, which has no values."""
    part = tensor.ds_tensor
    return part[: max(0, tensor.ds_numel - part.numel() * tensor.ds_zero_partition_rank)]


def full_tensor(tensor: Tensor) -> Tensor:
    """Full value of a tensor that may be sharded (FSDP2 and tensor parallelism by ``DTensor``, ZeRO-3 by DeepSpeed).

    A collective where it is sharded: every rank calls it, for the same tensors in the same order.
    """
    if isinstance(tensor, DTensor):
        device = tensor.device_mesh.device_type
        on_mesh = tensor if tensor.device.type == device else cast(DTensor, tensor.to(device))
        return on_mesh.full_tensor().detach()
    if is_zero3(tensor):
        import deepspeed

        with deepspeed.zero.GatheredParameters([tensor]):
            return tensor.detach().clone()
    return tensor.detach()


def full_numel(parameter: Tensor) -> int:
    """Number of elements of a parameter, those on other ranks included."""
    return int(parameter.ds_numel) if is_zero3(parameter) else parameter.numel()


def full_shape(parameter: Tensor) -> tuple[int, ...]:
    """Shape of a parameter, elements on other ranks included."""
    return tuple(parameter.ds_shape) if is_zero3(parameter) else tuple(parameter.shape)


def full_weights(module: nn.Module, selected: WeightFilter = lambda *_: True, keep: bool = True) -> dict[str, Tensor]:
    """Full parameters and persistent buffers of a module by name, on the CPU; a collective where weights are sharded.

    One tensor is gathered at a time, so that a rank holds little more than what it keeps.

    Args:
        module: module whose weights are gathered.
        selected: filter by name and tensor, the same on every rank. Buffers never require gradients.
        keep: whether this rank gets the result; ``{}`` if not.
    """
    weights: dict[str, Tensor] = {}
    for name, weight in named_weights(module):
        if selected(name, weight):
            full = full_tensor(weight)
            if keep:
                weights[name] = full.cpu().clone() if full.data_ptr() == _address(weight) else full.cpu()
    return weights


def named_weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Names of a module's ``state_dict``, and its parameters and persistent buffers as this rank has them."""
    return chain(module.named_parameters(remove_duplicate=False), persistent_buffers(module))


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Names and values of the buffers in a module's ``state_dict``, e.g. the router bias of DeepSeek-V3.

    Every rank has them in full, whatever shards its parameters.
    """
    for path, part in module.named_modules(remove_duplicate=False):
        for name, buffer in part.named_buffers(recurse=False, remove_duplicate=False):
            if is_persistent(part, name):
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
    return any(_is_shard(parameter) for parameter in module.parameters())


def _is_shard(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor) or is_zero3(tensor)


def _address(tensor: Tensor) -> int:
    return -1 if _is_shard(tensor) else tensor.data_ptr()
