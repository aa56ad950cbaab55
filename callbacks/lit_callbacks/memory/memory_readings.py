"""Memory readings of a device's allocator and of this process, in bytes."""

import os
from functools import cache
from mmap import PAGESIZE

import torch

from lit_callbacks.output.quantities import MIB


@cache
def _statm(process: int) -> int:
    """File descriptor of a process's ``/proc/<process>/statm``, kept open: it is read many times a step."""
    return os.open(f"/proc/{process}/statm", os.O_RDONLY)


def host_memory() -> int | None:
    """Bytes of the process's resident memory without mapped files; None where ``/proc`` is missing."""
    try:
        _, resident, shared = os.pread(_statm(os.getpid()), 256, 0).split(maxsplit=3)[:3]
    except OSError:
        return None
    return (int(resident) - int(shared)) * PAGESIZE


def allocated(device: torch.device) -> int | None:
    """Bytes of tensors on an accelerator; None on a CPU, whose allocator has no counter."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return torch.mps.current_allocated_memory() if device.type == "mps" else None


def reserved(device: torch.device) -> int | None:
    """Bytes of an accelerator's memory that the allocator holds, in use or not; None on a CPU."""
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device)
    return torch.mps.driver_allocated_memory() if device.type == "mps" else None


def take_peaks(device: torch.device) -> tuple[int, int] | None:
    """Peak bytes allocated and reserved since the last call, on CUDA; read on the host, without synchronization."""
    if device.type != "cuda":
        return None
    peaks = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    return peaks


def in_mib(figures: dict[str, int | None]) -> dict[str, float]:
    """Known readings in MiB, with ``_mib`` appended to their names."""
    return {f"{name}_mib": value / MIB for name, value in figures.items() if value is not None}
