"""From a recipe's optimizer and schedule to what Lightning steps; one optimizer made of two."""

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import nn
from torch.optim import Optimizer
from transformers import PreTrainedModel

from lit_ft.accumulation import optimizer_steps
from lit_ft.errors import RecipeError
from lit_ft.model.parameter_patterns import matching
from lit_ft.training.optimizers.schedules import WarmupSchedule

MATRICES = "matrices"
"""Key of a parameter group: True where it holds weight matrices of hidden layers, False where it holds the rest."""


def hidden_matrices(module: nn.Module) -> set[nn.Parameter]:
    """The two-dimensional weights of a module, less those of embeddings and of output heads."""
    outer: set[nn.Parameter] = set()
    for part in module.modules():
        head = part.get_output_embeddings() if isinstance(part, PreTrainedModel) else None
        for edge in (part if isinstance(part, nn.Embedding) else None, head):
            outer |= set() if edge is None else set(edge.parameters())
    # ZeRO-3 leaves an empty vector in place of a weight, and its shape beside it.
    return {p for p in module.parameters() if len(getattr(p, "ds_shape", p.shape)) == 2} - outer


def configure_optimizers(
    module: LightningModule,
    optimizer: OptimizerCallable,
    lr_scheduler: LRSchedulerCallable | None = None,
    lr_factors: Mapping[str, float] | None = None,
) -> OptimizerLRScheduler:
    """What ``LightningModule.configure_optimizers`` returns for an optimizer and schedule from a recipe.

    Frozen parameters get no optimizer state. Parameter groups are by learning-rate factor and by ``MATRICES``, those
    of matrices first. Warm-up schedules step by optimizer step; others by epoch, as LightningCLI has it.

    Raises:
        RecipeError: the schedule needs the run's length and there is none, or a factor is for no weight.
    """
    trains = {name: p for name, p in module.named_parameters() if p.requires_grad}
    factors = lr_factors or {}
    found = matching(factors, list(trains), "model.lr_factors")
    matrices = hidden_matrices(module)
    members: dict[tuple[bool, str | None], list[Any]] = {
        (is_matrix, pattern): [] for is_matrix in (True, False) for pattern in (None, *factors)
    }
    for name, parameter in trains.items():
        members[parameter in matrices, found.get(name)].append(parameter)
    members = {key: group for key, group in members.items() if group}
    built = optimizer([{"params": group, MATRICES: is_matrix} for (is_matrix, _), group in members.items()])
    for (_, pattern), group in zip(members, built.param_groups, strict=True):
        if pattern is not None:
            group["lr"] *= factors[pattern]
    if lr_scheduler is None:
        return built
    scheduler = lr_scheduler(built)
    if not isinstance(scheduler, WarmupSchedule):
        return {
            "optimizer": built,
            "lr_scheduler": {"scheduler": scheduler, "monitor": getattr(scheduler, "monitor", None)},
        }
    if scheduler.total_steps is None:
        trainer: Any = module.trainer
        # Asking Lightning opens the training data, before a resumed run has told a stream its place.
        has_no_length = trainer.max_epochs == -1 or getattr(trainer.datamodule, "streaming", False)
        steps = trainer.max_steps if has_no_length else optimizer_steps(trainer)
        if math.isinf(steps) or steps < 0:
            raise RecipeError(
                f"{type(scheduler).__name__} needs the run's length; set trainer.max_steps, or max_epochs where the "
                "data has a length"
            )
        scheduler.total_steps = int(steps)
    return {"optimizer": built, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def try_out(optimizer: OptimizerCallable, skeleton: nn.Module, takes_step: bool) -> Optimizer:
    """An optimizer for a few numbers of the shapes that train, which refuses what the whole one would refuse.

    Args:
        optimizer: makes it from parameters.
        skeleton: the model, without weights.
        takes_step: also take a step, with small gradients; some look at their arguments only then.

    Raises:
        ValueError: a step makes numbers that are not finite.
    """
    matrices = hidden_matrices(skeleton)
    kinds = dict.fromkeys((p in matrices, p.dim()) for p in skeleton.parameters() if p.requires_grad)
    groups = [{"params": [nn.Parameter(torch.full([8] * dim, 0.1))], MATRICES: kind} for kind, dim in kinds]
    level = _logger.level
    _logger.setLevel(logging.WARNING)  # the whole one says what it trains
    try:
        built: Any = optimizer(groups)
        if takes_step:
            for group in groups:
                group["params"][0].grad = torch.full_like(group["params"][0], 1e-3)  # type: ignore[index]
            getattr(built, "train", lambda: None)()  # schedule-free ones ask for it
            built.step(lambda: torch.zeros(()))
            if not all(group["params"][0].isfinite().all() for group in groups):  # type: ignore[index]
                raise ValueError("a step makes weights infinite: is a learning rate or weight decay too large?")
    finally:
        _logger.setLevel(level)
    return built


_logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")


class SplitOptimizer(Optimizer):
    """One optimizer for the weight matrices of hidden layers, another for all other weights.

    Muon takes matrices only, and is not meant for embeddings and output heads; AdamW trains those, norms and biases.
    To schedules, clipping and checkpoints the two are one optimizer.
    """

    def __init__(
        self, params: Iterable[dict[str, Any]], matrices: OptimizerCallable, others: OptimizerCallable
    ) -> None:
        """Build both.

        Args:
            params: parameter groups, each with the key ``MATRICES``, as ``configure_optimizers`` makes them.
            matrices: makes the optimizer of the groups in which it is True.
            others: makes the optimizer of the rest; not called where there is none, as with most adapters.

        Raises:
            RecipeError: no group holds matrices.
        """
        groups = list(params)
        of_matrices, of_others = ([g for g in groups if g[MATRICES] is kind] for kind in (True, False))
        if not of_matrices:
            raise RecipeError(
                "SplitOptimizer: no weight matrix of a hidden layer is trained; name the class of optimizer.others as "
                "optimizer itself"
            )
        self.parts = [build(part) for build, part in ((matrices, of_matrices), (others, of_others)) if part]
        super().__init__(self._groups(), {})
        rank_zero_info("optimizers: " + "; ".join(_describe(part) for part in self.parts))

    def _groups(self) -> list[dict[str, Any]]:
        # The parts' own dictionaries: what a schedule writes into them is what the parts read.
        return [group for part in self.parts for group in part.param_groups]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step both, after the closure has made the gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The parts' own, which know what in them is quantized."""
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Hand each part its own."""
        for part, saved in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(saved)
        self.param_groups = self._groups()


def _describe(optimizer: Optimizer) -> str:
    tensors = [p for group in optimizer.param_groups for p in group["params"]]
    return f"{type(optimizer).__name__} trains {sum(p.numel() for p in tensors):,} weights in {len(tensors)} tensors"
