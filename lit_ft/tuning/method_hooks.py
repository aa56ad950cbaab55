"""Hooks for PEFT methods that need more than gradients: a term in the loss, and a call after each optimizer step."""

from typing import Any, TypeGuard

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from peft import LoraConfig, PeftModel
from peft.tuners.adalora import AdaLoraModel
from torch import Tensor, nn

from lit_ft.gradient_norm import norms
from lit_ft.internals.peft import kasa_loss

MethodState = dict[str, Any]
"""Plain values and tensors of a method by name, for checkpoints."""

_IMPORTANCE = ("ipt", "exp_avg_ipt", "exp_avg_unc")
"""Attributes of AdaLoRA's rank allocator with the importance statistics of each weight."""


def regularization(model: nn.Module | None) -> Tensor | None:
    """Regularization term that the method adds to the loss of an optimizer step; None if it has none.

    AdaLoRA keeps its factors orthogonal (Zhang et al. 2023, arXiv:2303.10512, eq. 4), and so does KaSA (Wang et al.
    2024, arXiv:2412.06071, eq. 9-12).
    """
    if not isinstance(model, PeftModel):
        return None
    config = model.active_peft_config
    if isinstance(model.base_model, AdaLoraModel):
        factors = [(name, p) for name, p in model.named_parameters() if ".lora_A." in name or ".lora_B." in name]
        grams = [p @ p.T if ".lora_A." in name else p.T @ p for name, p in factors]
        distances = [torch.linalg.norm(gram - torch.eye(len(gram)).to(gram)) for gram in grams]
        return config.orth_reg_weight * torch.stack(distances).mean()
    if isinstance(config, LoraConfig) and config.kasa_config is not None:
        return kasa_loss(model)
    return None


def _is_adalora(model: nn.Module | None) -> TypeGuard[PeftModel]:
    return isinstance(model, PeftModel) and isinstance(model.base_model, AdaLoraModel)


def check_schedule(model: nn.Module | None, steps: float) -> None:
    """Warn if the length of AdaLoRA's schedule differs from that of the run, ``steps`` optimizer steps."""
    if not _is_adalora(model):
        return
    config = model.active_peft_config
    if config.total_step != steps:
        rank_zero_warn(
            f"AdaLoRA: total_step={config.total_step}, but the run has {steps:g} optimizer steps; ranks are final "
            f"after step {config.total_step - config.tfinal} (total_step - tfinal)"
        )


def after_optimizer_step(model: nn.Module | None, steps: int) -> None:
    """Update AdaLoRA's rank allocation from the gradients of the last step, which must not have been freed.

    A step that was skipped, by ``SpikeGuard`` (no gradients) or by a gradient scaler (infinite ones), does not change
    the importance statistics; the schedule of ranks continues. ``steps`` counts this step too.
    """
    if not _is_adalora(model):
        return
    allocator = model.base_model.rankallocator
    _put_beside(model, allocator)
    if _has_finite_gradients(model):
        model.base_model.update_and_allocate(steps)
    elif allocator.exp_avg_ipt:
        allocator.update_ipt = lambda _: None
        try:
            model.base_model.update_and_allocate(steps)
        finally:
            del allocator.update_ipt


def _put_beside(model: PeftModel, allocator: Any) -> None:
    """Move importance statistics to the model's device: a checkpoint is read before the model is on it."""
    for name in _IMPORTANCE:
        of_weights: dict[str, Tensor] = getattr(allocator, name)
        of_weights.update({key: value.to(model.device) for key, value in of_weights.items()})


def _has_finite_gradients(model: PeftModel) -> bool:
    gradients = [p.grad for name, p in model.named_parameters() if "lora_" in name and p.requires_grad]
    present = [gradient for gradient in gradients if gradient is not None]
    return len(present) == len(gradients) and bool(norms(present).isfinite().all())


def state_of(model: nn.Module | None) -> MethodState:
    """State of the method that a checkpoint must hold besides its weights."""
    if not _is_adalora(model):
        return {}
    allocator = model.base_model.rankallocator
    return {
        "rank_pattern": model.active_peft_config.rank_pattern,
        **{name: dict(getattr(allocator, name)) for name in _IMPORTANCE},
    }


def load_state(model: PeftModel, state: MethodState) -> None:
    """Restore the state that ``state_of`` returned."""
    if not state:
        return
    model.active_peft_config.rank_pattern = state["rank_pattern"]
    for name in _IMPORTANCE:
        setattr(model.base_model.rankallocator, name, dict(state[name]))
