"""Copies between host and device for which the host does not wait; one to the host waits where it is read."""

import torch
from torch import Tensor


def queued_copy(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor in host memory to a device, behind the work that is queued there.

    ``torch.tensor(numbers, device=...)`` waits for a GPU.
    """
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


class HostCopy:
    """Tensor of a device that the host reads later.

    On CUDA the copy is queued behind the work that computes the tensor, and ``value`` waits for it; the host goes on
    queuing work meanwhile. A tensor in host memory is kept as it is.
    """

    def __init__(self, tensor: Tensor) -> None:
        """Start the copy.

        Args:
            tensor: tensor of any shape; it may be changed afterwards.
        """
        self._arrived: torch.cuda.Event | None = None
        if tensor.device.type != "cuda":
            self._tensor = tensor.detach().clone()
            return
        self._tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._tensor.copy_(tensor.detach(), non_blocking=True)
        self._arrived = torch.cuda.Event()
        self._arrived.record()

    def value(self) -> Tensor:
        """Wait for the copy, and return it: a tensor in host memory where it comes from CUDA."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._tensor
