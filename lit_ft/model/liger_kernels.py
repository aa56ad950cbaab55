"""Liger's Triton kernels for norms, rotary embeddings and gated MLPs, on CUDA (Hsu et al. 2024, arXiv:2410.10989)."""

import torch
from transformers import PretrainedConfig

from lit_ft.errors import RecipeError, check_installed
from lit_ft.internals import liger_kernel


def check(config: PretrainedConfig, device: torch.device) -> None:
    """Refuse devices and architectures that Liger does not support.

    Raises:
        RecipeError: the device is not CUDA, the package is missing, or it has no kernels for the architecture.
    """
    if device.type != "cuda":
        raise RecipeError(
            f"model.liger=true needs a CUDA device, this run is on {device.type}; set it to false "
            "(model.compile fuses the same operations anywhere)"
        )
    check_installed("model.liger=true needs", "liger", "liger_kernel")
    served = liger_kernel.supported_model_types()
    if config.model_type not in served:
        raise RecipeError(
            f"model.liger=true: Liger has no kernels for {config.model_type!r}, but for {', '.join(sorted(served))}; "
            "set it to false"
        )
