"""Learning-rate schedules with warm-up, stepped once per optimizer step."""

import math

from lit_callbacks.output.quantities import as_count
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import StateDict

from lit_ft.errors import RecipeError

_OF_THE_RECIPE = ("warmup", "stable", "total_steps", "final_fraction", "has_length_of_run")
"""Options of the schedules, which a resumed run takes from its recipe."""


class WarmupSchedule(LambdaLR):
    """Linear warm-up from 0, then ``decay`` over the rest of the run, stepped once per optimizer step.

    ``CausalLM`` sets the length of the run if ``total_steps`` is None.
    """

    def __init__(self, optimizer: Optimizer, warmup: float = 0.0, total_steps: int | None = None) -> None:
        """Set the lengths of the warm-up and of the run.

        Args:
            optimizer: optimizer whose learning rate is scheduled.
            warmup: length of the warm-up: a number of optimizer steps (1 or more), or a fraction of the run (below 1).
            total_steps: number of optimizer steps of the run; null takes it from the trainer.
        """
        _check_length("warmup", warmup)
        if total_steps is not None and total_steps < 1:
            raise RecipeError(f"total_steps={total_steps} must be 1 or more; leave it out for the length of the run")
        self.warmup = warmup
        self.total_steps, self.has_length_of_run = total_steps, total_steps is None
        super().__init__(optimizer, self.factor)

    @property
    def needs_length(self) -> bool:
        """Whether it depends on the length of the run."""
        return True

    @property
    def warmup_steps(self) -> int:
        """Number of optimizer steps until the full learning rate."""
        return self.steps_of(self.warmup)

    @property
    def steps_before_decay(self) -> int:
        """Number of optimizer steps until the decay begins."""
        return self.warmup_steps

    def steps_of(self, length: float) -> int:
        """Number of optimizer steps of a length that is given as one, or as a fraction of the run."""
        return int(length) if length >= 1 else math.ceil(length * (self.total_steps or 0))

    @property
    def warning(self) -> str | None:
        """What is wrong with the lengths of the warm-up and of the run, or None."""
        if self.total_steps is None or self.warmup_steps < self.total_steps:
            return None
        return (
            f"the warm-up takes {as_count(self.warmup_steps, 'optimizer step')} and the run {self.total_steps:,}: "
            "the learning rate never reaches its full value; lower lr_scheduler.warmup, or train longer"
        )

    def factor(self, step: int) -> float:
        """Fraction of the full learning rate at an optimizer step, counted from 0."""
        # The constructor asks for step 0 before the run's length is known.
        if self.total_steps is None and self.needs_length:
            return 0.0 if self.warmup else 1.0
        if step < self.warmup_steps:
            return step / self.warmup_steps
        rest = max(1, (self.total_steps or 0) - self.steps_before_decay)
        return self.decay(min(1.0, max(0, step - self.steps_before_decay) / rest))

    def state_dict(self) -> StateDict:
        """Position in the schedule; its options are not saved but come from the recipe: a resumed run may be longer."""
        return {name: value for name, value in super().state_dict().items() if name not in _OF_THE_RECIPE}

    def decay(self, progress: float) -> float:
        """Fraction of the full learning rate after warm-up; ``progress`` runs from 0 to 1."""
        return 1.0


def _check_length(name: str, length: float) -> None:
    if not 0 <= length < math.inf or (length >= 1 and length != int(length)):
        raise RecipeError(f"{name}={length} must be a share below 1 or a whole number of optimizer steps")


class ConstantWithWarmup(WarmupSchedule):
    """Linear warm-up, then a constant learning rate."""

    @property
    def needs_length(self) -> bool:
        """Whether it depends on the length of the run: the warm-up is a fraction of it."""
        return 0 < self.warmup < 1


class DecayingSchedule(WarmupSchedule):
    """Linear warm-up, then a decay to a fraction of the full learning rate at the end of the run.

    With ``stable`` the full learning rate is kept between them (warmup-stable-decay, Hu et al. 2024, arXiv:2404.06395).
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup: float = 0.0,
        total_steps: int | None = None,
        final_fraction: float = 0.0,
        stable: float = 0.0,
    ) -> None:
        """Set the lengths of the warm-up and of the run, and where the decay ends.

        Args:
            optimizer: optimizer whose learning rate is scheduled.
            warmup: length of the warm-up: a number of optimizer steps (1 or more), or a fraction of the run (below 1).
            total_steps: number of optimizer steps of the run; null takes it from the trainer.
            final_fraction: learning rate at the end of the run, as a fraction of the full one, e.g. 0.1.
            stable: length of the time at the full learning rate before the decay: a number of optimizer steps (1 or
                more), or a fraction of the run (below 1), e.g. 0.7.
        """
        if not 0 <= final_fraction <= 1:
            raise RecipeError(
                f"final_fraction={final_fraction} must be a fraction of optimizer.lr from 0 to 1, e.g. 0.1"
            )
        _check_length("stable", stable)
        self.final_fraction, self.stable = final_fraction, stable
        super().__init__(optimizer, warmup, total_steps)

    @property
    def steps_before_decay(self) -> int:
        """Number of optimizer steps until the decay begins."""
        return self.warmup_steps + self.steps_of(self.stable)

    @property
    def warning(self) -> str | None:
        """What is wrong with the lengths of warm-up, stable part and run, or None."""
        if super().warning is not None or not self.stable or self.steps_before_decay < (self.total_steps or math.inf):
            return super().warning
        return (
            f"warm-up and stable part take {as_count(self.steps_before_decay, 'optimizer step')} and the run "
            f"{self.total_steps:,}: the learning rate never decays; lower lr_scheduler.stable, or train longer"
        )

    def decay(self, progress: float) -> float:
        """Fraction of the full learning rate: 1 at the end of warm-up, ``final_fraction`` at the end of the run."""
        return self.final_fraction + (1.0 - self.final_fraction) * self.shape(progress)

    def shape(self, progress: float) -> float:
        """Decay from 1 to 0; ``progress`` runs from 0 to 1."""
        raise NotImplementedError


class LinearWithWarmup(DecayingSchedule):
    """Linear warm-up, then linear decay to 0, or to ``final_fraction``, at the end of the run."""

    def shape(self, progress: float) -> float:
        """Straight line."""
        return 1.0 - progress


class CosineWithWarmup(DecayingSchedule):
    """Linear warm-up, then decay along half a cosine (Loshchilov & Hutter 2017) to 0, or to ``final_fraction``."""

    def shape(self, progress: float) -> float:
        """Half a cosine."""
        return 0.5 * (1.0 + math.cos(math.pi * progress))
