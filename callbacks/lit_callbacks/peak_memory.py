"""Peak memory of this process and of its device, in bytes."""

import resource
import sys

import torch


def host_peak() -> int:
    """Bytes of the process's peak resident memory, mapped files included."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def device_peak(device: torch.device) -> int | None:
    """Peak bytes of tensors on a CUDA device since its counters were reset; None on any other device."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
