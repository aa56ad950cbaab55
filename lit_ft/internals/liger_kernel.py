"""Private API of liger-kernel, as read in liger-kernel 0.8."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def supported_model_types() -> set[str]:
    """``model_type`` of the architectures that have kernels."""
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    return set(MODEL_TYPE_TO_APPLY_LIGER_FN)


def apply_to_instance(model: PreTrainedModel) -> None:
    """Replace a model's norms, rotary embeddings and MLPs, and no loss: ours does not hold all logits either.

    Rotary embeddings are replaced in the architecture's module, so for all its models in this process. No public
    function takes a model that exists: transformers' Trainer calls this one as well.
    """
    from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(model=model, cross_entropy=False, fused_linear_cross_entropy=False)
