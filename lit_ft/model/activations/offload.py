"""Offload of activations to host memory between the forward and the backward pass."""

from collections import deque
from collections.abc import Callable
from functools import cache
from typing import ParamSpec, TypeVar, cast
from weakref import ref

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lit_ft.internals.torch import is_weight

_Inputs = ParamSpec("_Inputs")
_Output = TypeVar("_Output")

_NEAR = 2
"""Saved tensors whose copies, to the host or back, run beside computation; they are in device memory meanwhile."""


class CopyStream:
    """Copies between a device and the host beside the device's computation; on a CPU each is done at once."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def start(self, target: Tensor, source: Tensor) -> torch.cuda.Event | None:
        """Start a copy after what the device computes now; returns the event of its end."""
        if self._stream is None:
            target.copy_(source)
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            return self._stream.record_event()

    def wait(self, end: torch.cuda.Event | None) -> None:
        """Let what the device computes from now on wait for the end of a copy; the host goes on."""
        if end is not None:
            end.wait()


copy_stream = cache(CopyStream)
"""The stream of a device, which all its forward passes share."""


class _Activation:
    """A tensor saved for the backward pass, and its copy in pinned host memory."""

    def __init__(self, tensor: Tensor, waiting: "dict[int, ref[_Activation]]") -> None:
        """Start the copy to the host.

        Args:
            tensor: the tensor, on the device.
            waiting: by identity, the tensors of a pass that its backward pass has not used, in the order of their
                saving; this one is added.
        """
        self._waiting = waiting
        self._on_device: Tensor | None = tensor
        self._copied: torch.cuda.Event | None = None
        self._stream, self._device = copy_stream(tensor.device), tensor.device
        self._on_host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        self._copied = self._stream.start(self._on_host, tensor)
        waiting[id(self)] = ref(self)

    def leave(self) -> None:
        """Give up the tensor in device memory, for what is computed after the copy."""
        self._stream.wait(self._copied)
        self._on_device = None

    def fetch(self) -> None:
        """Start the copy to the device, unless the tensor is still there."""
        if self._on_device is None:
            # Memory of the stream that computes: once the tensor is used, it is free for what is computed next.
            self._on_device = torch.empty_like(self._on_host, device=self._device)
            self._copied = self._stream.start(self._on_device, self._on_host)

    def take(self) -> Tensor:
        """The tensor on the device."""
        self.fetch()
        tensor = cast(Tensor, self._on_device)
        self.leave()
        self._waiting.pop(id(self), None)
        return tensor

    def __del__(self) -> None:
        self._waiting.pop(id(self), None)
        if self._on_device is not None:  # not needed after all; its memory must not be used anew while it is copied
            self.leave()


class ActivationsOnHost(saved_tensors_hooks):
    """Context in which tensors saved for the backward pass are copied to pinned host memory, and back in time.

    Copies run beside computation. While the backward pass computes with a tensor, the two that were saved last before
    it are on their way back. The last two of all are needed first, and never leave. Weights stay on the device. With
    activation checkpointing only the inputs of layers are copied: torch saves nothing else.
    """

    def __init__(self) -> None:
        leaving: deque[_Activation] = deque()
        waiting: dict[int, ref[_Activation]] = {}

        def pack(tensor: Tensor) -> Tensor | _Activation:
            if is_weight(tensor):
                return tensor
            leaving.append(_Activation(tensor, waiting))
            if len(leaving) > _NEAR:
                leaving.popleft().leave()
            return leaving[-1]

        def unpack(packed: Tensor | _Activation) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            leaving.clear()
            tensor = packed.take()
            for reference in list(waiting.values())[-_NEAR:]:  # a copy: collected tensors leave the dictionary
                if (needed_next := reference()) is not None:
                    needed_next.fetch()
            return tensor

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
