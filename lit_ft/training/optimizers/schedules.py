"""Learning-rate schedules with warm-up, by optimizer step."""

import math
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lit_ft.errors import RecipeError


class WarmupSchedule(LambdaLR):
    """Linear warm-up from 0, then ``decay`` over the rest of the run.

    Stepped once per optimizer step. ``CausalLM`` fills in the run's length when ``total_steps`` is None.
    """

    def __init__(self, optimizer: Optimizer, warmup: float = 0.0, total_steps: int | None = None) -> None:
        """Set the length of warm-up and run.

        Args:
            optimizer: whose learning rate is scheduled.
            warmup: a number of optimizer steps (1 or more) or a share of the run (below 1).
            total_steps: optimizer steps of the run; None takes them from the trainer.
        """
        if not 0 <= warmup < math.inf or (warmup >= 1 and warmup != int(warmup)):
            raise RecipeError(f"warmup={warmup} must be a share below 1 or a whole number of optimizer steps")
        self.warmup = warmup
        self.total_steps = total_steps
        super().__init__(optimizer, self.factor)

    @property
    def warmup_steps(self) -> int:
        """Optimizer steps until the full learning rate."""
        if self.warmup >= 1:
            return int(self.warmup)
        return math.ceil(self.warmup * (self.total_steps or 0))

    def factor(self, step: int) -> float:
        """Share of the full learning rate at an optimizer step, counted from 0."""
        if self.total_steps is None:  # the constructor asks for step 0 before the run's length is known
            return 0.0 if self.warmup else 1.0
        if step < self.warmup_steps:
            return step / self.warmup_steps
        rest = max(1, self.total_steps - self.warmup_steps)
        return self.decay(min(1.0, (step - self.warmup_steps) / rest))

    def state_dict(self) -> dict[str, Any]:
        """The place in the schedule; its shape is the recipe's, so that a resumed run may be longer."""
        return {name: value for name, value in super().state_dict().items() if name not in ("warmup", "total_steps")}

    def decay(self, progress: float) -> float:
        """Share of the full learning rate after warm-up; ``progress`` runs from 0 to 1."""
        return 1.0


class ConstantWithWarmup(WarmupSchedule):
    """Linear warm-up, then constant."""


class LinearWithWarmup(WarmupSchedule):
    """Linear warm-up, then linear to 0 at the end of the run."""

    def decay(self, progress: float) -> float:
        """1 at the end of warm-up, 0 at the end of the run."""
        return 1.0 - progress


class CosineWithWarmup(WarmupSchedule):
    """Linear warm-up, then half a cosine to 0 at the end of the run (Loshchilov & Hutter 2017)."""

    def decay(self, progress: float) -> float:
        """1 at the end of warm-up, 0 at the end of the run."""
        return 0.5 * (1.0 + math.cos(math.pi * progress))
