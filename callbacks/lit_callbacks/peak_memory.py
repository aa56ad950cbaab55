"""Peak memory of this process and of its device, in bytes."""

import sys

import torch

try:
    import resource
except ModuleNotFoundError:  # Windows
    resource = None  # type: ignore[assignment]


def host_peak() -> int | None:
    """Bytes of the process's peak resident memory, mapped files included; None on Windows."""
    if resource is None:
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def device_peak(device: torch.device) -> int | None:
    """Peak bytes of tensors on a CUDA device since its counters were reset; None on any other device."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
