"""Gradient norm, clipping, and the end of a run before values that are not finite are saved."""

from collections.abc import Sequence

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lit_callbacks.protocols import SumsGradientNorm, grad_scaler
from torch import Tensor

from lit_ft.errors import RecipeError
from lit_ft.gradient_norm import GradientNorm, clip, gradient_norm, with_gradients
from lit_ft.protocols import Checkpoint
from lit_ft.training.finite import FiniteCheck, check_trained_weights
from lit_ft.training.optimizers import compatibility as optimizer_support
from lit_ft.training.steps.lightning_callbacks import LightningCallbacksModule
from lit_ft.tuning.targets import unreached_at_times


class GuardedStepsModule(LightningCallbacksModule):
    """LightningModule that logs the gradient norm, clips by it, and saves nothing that is NaN or infinite."""

    def __init__(self) -> None:
        super().__init__()
        self._gradient_norm = GradientNorm()
        self._finite = FiniteCheck()
        self._has_stepped = False

    def on_fit_start(self) -> None:
        """Check that what a gradient scaler scales can be divided by its scale again.

        Raises:
            RecipeError: a weight trains in float16.
        """
        super().on_fit_start()
        for optimizer in self.trainer.optimizers if grad_scaler(self.trainer) is not None else ():
            optimizer_support.check_scaled_weights(optimizer)

    def on_before_backward(self, loss: Tensor) -> None:
        """Refuse a run whose loss does not depend on what trains.

        Raises:
            RecipeError: no trained weight has a gradient.
        """
        super().on_before_backward(loss)
        if not loss.requires_grad:
            names = [name for name, parameter in self.named_parameters() if parameter.requires_grad]
            raise RecipeError(
                f"the loss does not depend on any of the {len(names)} weights that train ({_some(names)}); choose "
                "others by the adapter's target_modules, or by model.trainable"
            )

    def measured_gradient_norm(self, optimizer: torch.optim.Optimizer) -> Tensor | None:
        """Norm of all gradients over all ranks, a scalar, before clipping; measured once per step, whoever asks for it.

        A collective. None where the strategy measures and clips by itself.
        """
        strategy: object = self.trainer.strategy
        measure = strategy.gradient_norm if isinstance(strategy, SumsGradientNorm) else gradient_norm
        return self._gradient_norm.of(optimizer, measure)

    def log_gradient_norm(self, norm: Tensor, has_scaler: bool) -> None:
        """Log the gradient norm of the step; see ``LogsGradientNorm``."""
        self.log("train/grad_norm", norm)
        if not has_scaler:
            self._finite.watch(self.trainer, "train/grad_norm", norm)

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Log the gradient norm before clipping, and clip with that same norm; of a skipped step, log it alone."""
        has_scaler = grad_scaler(self.trainer) is not None
        if has_scaler:
            optimizer_support.check_situation(optimizer, "scaled", "trainer.precision=16-mixed")
        removed = self._gradient_norm.before_removal(optimizer)
        norm = self.measured_gradient_norm(optimizer) if removed is None else None
        self._gradient_norm.forget()
        if removed is not None:
            self.log("train/grad_norm", removed)
        is_by_norm = (gradient_clip_algorithm or "norm") == "norm"
        if norm is not None:
            if not self._has_stepped:
                self._name_weights_without_gradient()
            self.log_gradient_norm(norm, has_scaler)
            if gradient_clip_val and is_by_norm:
                clip(with_gradients(optimizer), norm, float(gradient_clip_val))
        if not is_by_norm:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def _name_weights_without_gradient(self) -> None:
        """Warn of trained weights that the first optimizer step of this process gives no gradient."""
        self._has_stepped = True
        trained = {name: p for name, p in self.named_parameters() if p.requires_grad}
        without = [name for name, parameter in trained.items() if parameter.grad is None]
        if without := [*without, *unreached_at_times.unreached(self)]:
            rank_zero_warn(
                f"the first step changes {len(trained) - len(without)} of {len(trained)} trained weights: the loss has "
                f"no gradient of the others ({_some(without)}). Where that is not wanted, leave them out of "
                "model.trainable, or of the adapter's target_modules"
            )

    def on_train_epoch_end(self) -> None:
        """Check what a GPU still had to compute, before the run is called done."""
        super().on_train_epoch_end()
        self._finite.look_at_all(self.trainer)

    def on_save_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Refuse to save weights, or to save after a loss or gradient norm, that are not finite.

        Raises:
            NotFinite: one of them is not finite.
        """
        self._finite.look_at_all(self.trainer)
        check_trained_weights(self.trainer, self)
        super().on_save_checkpoint(checkpoint)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
