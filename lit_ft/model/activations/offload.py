"""Offload of activations to host memory between the forward and the backward pass."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from lit_ft.internals.torch import is_weight

_Inputs = ParamSpec("_Inputs")
_Output = TypeVar("_Output")


class ActivationsOnHost(saved_tensors_hooks):
    """Context in which tensors saved for the backward pass are copied to pinned host memory, and back when needed.

    torch's ``save_on_cpu`` copies them, in stream order; alone it would also copy weights, which stay on the device
    anyway. With activation checkpointing only the inputs of layers are copied: torch saves nothing else.
    """

    def __init__(self) -> None:
        host = save_on_cpu(pin_memory=True)

        def pack(tensor: Tensor) -> object:
            if is_weight(tensor):
                return tensor
            # `save_on_cpu` makes contiguous tensors, and compiled layers count on the strides that they saved.
            order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
            return host.pack_hook(tensor.permute(order)), order

        def unpack(packed: object) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            on_host, order = cast(tuple[object, list[int]], packed)
            return host.unpack_hook(on_host).permute([order.index(dimension) for dimension in range(len(order))])

        super().__init__(pack, unpack)


def keeping_on_host(decoder: Callable[_Inputs, _Output]) -> Callable[_Inputs, _Output]:
    """Wrap a decoder so that its activations are in host memory between forward and backward pass."""

    def run(*args: _Inputs.args, **options: _Inputs.kwargs) -> _Output:
        with ActivationsOnHost():
            return decoder(*args, **options)

    return run


def warn_if_useless(device: torch.device) -> None:
    """Print a notice if the device is not CUDA, where offload only costs time."""
    if device.type != "cuda":
        rank_zero_info(
            f"model.activation_offload: activations on this device ({device.type}) lie in the host's memory anyway; "
            "copying them only costs time here"
        )
