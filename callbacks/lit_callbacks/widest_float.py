"""The floating-point format with the most digits that a device computes in."""

import torch


def widest_float(device: torch.device) -> torch.dtype:
    """fp64; fp32 on MPS, which has no fp64."""
    return torch.float32 if device.type == "mps" else torch.float64
