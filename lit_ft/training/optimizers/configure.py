"""Setup of a recipe's optimizer and learning-rate schedule, and an optimizer composed of two."""

import logging
import math
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.types import LRSchedulerConfigType, OptimizerLRSchedulerConfig
from lit_callbacks.distributed.gather import full_shape
from lit_callbacks.protocols import KeepsTwoWeightSets
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR
from torch.optim.optimizer import StateDict
from transformers import PreTrainedModel

from lit_ft.accumulation import accumulation, optimizer_steps
from lit_ft.errors import RecipeError
from lit_ft.model.architecture import head_layer
from lit_ft.model.parameter_patterns import matching
from lit_ft.process import datamodule_of
from lit_ft.protocols import MayStream
from lit_ft.training.optimizers.schedules import ConstantWithWarmup, DecayingSchedule, WarmupSchedule

MATRICES = "matrices"
"""Key of a parameter group: True for weight matrices of hidden layers, False for all other weights."""
PATTERN = "pattern"
"""Key of a parameter group: its pattern of ``lr_factors``, or None. By it, groups that are alike otherwise stay apart
where a checkpoint joins those of pipeline stages."""
NO_WEIGHT_DECAY = "no_weight_decay"
"""Key of the parameter groups that weight decay leaves alone; other groups lack it."""


@runtime_checkable
class ReadsMetric(Protocol):
    """Schedule that lowers the learning rate by a metric, e.g. Lightning's ``ReduceLROnPlateau``."""

    monitor: str
    """Name of the metric."""


def hidden_matrices(module: nn.Module) -> set[nn.Parameter]:
    """Two-dimensional weights of a module, except those of embeddings and output heads."""
    outer: set[nn.Parameter] = set()
    for part in module.modules():
        head = head_layer(part) if isinstance(part, PreTrainedModel) else None
        for edge in (part if isinstance(part, nn.Embedding) else None, head):
            outer |= set() if edge is None else set(edge.parameters())
    return {p for p in module.parameters() if len(full_shape(p)) == 2} - outer


def configure_optimizers(
    module: LightningModule,
    optimizer: OptimizerCallable,
    lr_scheduler: LRSchedulerCallable | None = None,
    lr_factors: Mapping[str, float] | None = None,
    no_weight_decay: Sequence[str] = (),
    names: Iterable[str] | None = None,
) -> Optimizer | OptimizerLRSchedulerConfig:
    """Return value of ``LightningModule.configure_optimizers`` for the optimizer and schedule of a recipe.

    ``names`` are those of all weights that train, where this process holds some of them (a pipeline's stage).

    Frozen parameters get no optimizer state. Parameters are grouped by ``MATRICES``, matrices first, by
    learning-rate factor, and by whether they decay. Warm-up schedules are stepped once per optimizer step; others once
    per epoch, as in LightningCLI.

    Raises:
        RecipeError: the schedule needs the length of the run, which is unknown, a pattern matches no weight, or the
            optimizer has no weight decay.
    """
    built = _with_groups(optimizer, module, lr_factors or {}, no_weight_decay, names)
    if lr_scheduler is None:
        return built
    given = [float(group["lr"]) for group in built.param_groups]  # schedules write into tensors
    scheduler = lr_scheduler(built)
    if not isinstance(scheduler, WarmupSchedule) and not any(group["lr"] for group in built.param_groups):
        rank_zero_warn(
            f"lr_scheduler: {type(scheduler).__name__} steps once per epoch and begins with a learning rate of 0: the "
            "first epoch trains nothing; for a warm-up in optimizer steps take lit_ft.schedules, e.g. CosineWithWarmup"
        )
    if (note := describe_own_rates(scheduler, given, built)) is not None:
        rank_zero_info(note)
    if not isinstance(scheduler, WarmupSchedule):
        metric = scheduler.monitor if isinstance(scheduler, ReadsMetric) else None
        every = _epochs_between_values(metric, module)
        often = "once per epoch" if every in (None, 1) else f"every {every} epochs"
        rank_zero_info(
            f"lr_scheduler: {type(scheduler).__name__} steps {often}; those of lit_ft.schedules once per optimizer step"
        )
        # Where validations are counted over epochs, the first epochs may have no value: not strict.
        config: LRSchedulerConfigType = {"scheduler": scheduler, "monitor": metric, "frequency": every or 1}
        return {"optimizer": built, "lr_scheduler": {**config, "strict": every is not None}}
    if scheduler.total_steps is None:
        scheduler.total_steps = _length(module.trainer, scheduler)
    elif isinstance(scheduler, DecayingSchedule) and scheduler.total_steps < (
        steps := _known_length(module.trainer) or 0
    ):
        rank_zero_warn(
            f"lr_scheduler.total_steps={scheduler.total_steps:,} is less than the run's {steps:,} optimizer steps, the "
            "last of which keep its last learning rate; leave it out for the length of the run"
        )
    if (warning := scheduler.warning) is not None:
        rank_zero_warn(warning)
    return {"optimizer": built, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def optimizer_and_schedules(made: Optimizer | OptimizerLRSchedulerConfig) -> tuple[Optimizer, list[object]]:
    """The optimizer and the schedules of what ``configure_optimizers`` returns."""
    if isinstance(made, Optimizer):
        return made, []
    schedule = made["lr_scheduler"]
    return made["optimizer"], [schedule["scheduler"] if isinstance(schedule, dict) else schedule]


def _epochs_between_values(metric: str | None, module: LightningModule) -> int | None:
    """Epochs from one value of a schedule's metric to the next; None where no number of epochs tells."""
    return module.trainer.check_val_every_n_epoch if metric is not None and metric.startswith("val/") else 1


def describe_own_rates(scheduler: object, given: Sequence[float], optimizer: Optimizer) -> str | None:
    """Text on a schedule whose learning rates are its own options, as those of OneCycleLR and CyclicLR; else None.

    Args:
        scheduler: the schedule.
        given: learning rates of the optimizer's groups before the schedule was made.
        optimizer: the optimizer.
    """
    bases = [group.get("initial_lr", group["lr"]) for group in optimizer.param_groups]
    if all(float(base) == float(lr) for base, lr in zip(bases, given, strict=True)):
        return None
    rates = set(map(float, given))
    vain = f"optimizer.lr={rates.pop():g} has" if len(rates) == 1 else "optimizer.lr and model.lr_factors have"
    return (
        f"lr_scheduler: {type(scheduler).__name__} takes learning rates from its own options (from {float(bases[0]):g} "
        f"on), so that {vain} no effect; set them there, as max_lr"
    )


def follow_run(schedule: object, trainer: Trainer) -> None:
    """Give a schedule the length of a resumed run, which is known only once the steps before it are."""
    if isinstance(schedule, WarmupSchedule) and schedule.has_length_of_run:
        schedule.total_steps = _length(trainer, schedule)


def check_total_steps(schedule: object, trainer: Trainer) -> None:
    """Refuse a ``OneCycleLR`` that would end the run with an error at the end of an epoch.

    Raises:
        RecipeError: it has fewer steps than the run has epochs.
    """
    if isinstance(schedule, OneCycleLR) and _ends_epochs(trainer, schedule.last_epoch, schedule.total_steps + 1):
        limit, advice = "max_epochs", "give both alike"
        if trainer.max_steps != -1:
            limit, advice = "max_steps", "give total_steps as many as the run has epochs"
        raise RecipeError(
            f"lr_scheduler: OneCycleLR steps once per epoch, {schedule.total_steps} times (total_steps), and would end "
            f"the run in its next epoch with an error: trainer.{limit}={getattr(trainer, limit)}; {advice} when "
            "the run starts, or take a schedule of lit_ft.schedules, which a resumed run may make longer"
        )


def _ends_epochs(trainer: Trainer, first: int, count: int) -> bool:
    """Whether a run that goes on with epoch ``first`` comes to the end of ``count`` epochs, as far as is known."""
    if trainer.max_epochs is not None and 0 <= trainer.max_epochs < count:
        return False
    if trainer.max_steps == -1:
        return trainer.max_epochs is not None and trainer.max_epochs != -1
    if math.isinf(batches := trainer.num_training_batches):  # of a stream, or of data that is not read yet
        return False
    steps = sum(math.ceil(batches / accumulation(trainer, epoch)) for epoch in range(first, count))
    return trainer.global_step + steps <= trainer.max_steps


def _with_groups(
    optimizer: OptimizerCallable,
    module: nn.Module,
    factors: Mapping[str, float],
    no_weight_decay: Sequence[str],
    names: Iterable[str] | None,
) -> Optimizer:
    """Optimizer of a module's trainable parameters, in groups."""
    trains = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if not trains:
        raise RecipeError("no weight of the model trains: each has requires_grad=False, as after module.freeze()")
    pattern_of, undecayed = match_options(list(names or trains), factors, no_weight_decay)
    matrices = hidden_matrices(module)
    members: dict[tuple[bool, str | None, bool], list[nn.Parameter]] = {
        (is_matrix, pattern, decays): []
        for is_matrix in (True, False)
        for pattern in (None, *factors)
        for decays in (True, False)
    }
    for name, parameter in trains.items():
        members[parameter in matrices, pattern_of.get(name), name not in undecayed].append(parameter)
    members = {key: group for key, group in members.items() if group}
    built = optimizer(
        [
            {"params": group, MATRICES: is_matrix, PATTERN: pattern, **({} if decays else {NO_WEIGHT_DECAY: True})}
            for (is_matrix, pattern, decays), group in members.items()
        ]
    )
    for (_, pattern, _), group in zip(members, built.param_groups, strict=True):
        # A tensor is that of all groups and of the recipe, and schedules write into it: each group gets its own.
        if pattern is not None or isinstance(group.get("lr"), Tensor):
            group["lr"] = group["lr"] * (1.0 if pattern is None else factors[pattern])
    if undecayed:
        _end_weight_decay(built)
    return built


def match_options(
    names: Sequence[str], lr_factors: Mapping[str, float], no_weight_decay: Sequence[str]
) -> tuple[dict[str, str], frozenset[str]]:
    """Pattern of the learning rate's factor by name of weight, and the names of weights that do not decay.

    Raises:
        RecipeError: a pattern is not a regular expression, or matches no name, or a factor is below 0.
    """
    for pattern, factor in lr_factors.items():
        if not 0 <= factor < math.inf:
            raise RecipeError(f"model.lr_factors: {pattern}: {factor:g} must be a number of 0 or more, e.g. 0.1")
    undecayed = matching(no_weight_decay, names, "model.no_weight_decay")
    return matching(lr_factors, names, "model.lr_factors"), frozenset(undecayed)


def _end_weight_decay(optimizer: Optimizer) -> None:
    """Set the weight decay of the groups that have none to 0."""
    if not all("weight_decay" in group for group in optimizer.param_groups):
        raise RecipeError(
            f"model.no_weight_decay: {type(optimizer).__name__} has no option weight_decay; leave no_weight_decay out"
        )
    if not any(group["weight_decay"] for group in optimizer.param_groups):
        rank_zero_warn("model.no_weight_decay has no effect: the optimizer's weight_decay is 0")
    for group in optimizer.param_groups:
        if NO_WEIGHT_DECAY in group:
            group["weight_decay"] = 0.0


def _length(trainer: Trainer, schedule: WarmupSchedule) -> int | None:
    """Optimizer steps of a run; one whose length is not known is refused where the schedule needs it."""
    if (steps := _known_length(trainer)) is None and schedule.needs_length:
        or_steps = ", or warmup as a number of optimizer steps" if isinstance(schedule, ConstantWithWarmup) else ""
        raise RecipeError(
            f"{type(schedule).__name__} needs the run's length; set trainer.max_steps, or max_epochs where the data "
            f"has a length{or_steps}"
        )
    return steps


def _known_length(trainer: Trainer) -> int | None:
    """Optimizer steps of a run; None where its length is not known."""
    # Lightning would open the training data to answer, before a resumed run has restored a stream's position.
    data = datamodule_of(trainer)
    is_stream = isinstance(data, MayStream) and data.streaming
    has_no_length = trainer.max_epochs == -1 or is_stream
    steps = trainer.max_steps if has_no_length else optimizer_steps(trainer)
    return None if math.isinf(steps) or steps < 0 else int(steps)


def try_out(optimizer: OptimizerCallable, skeleton: nn.Module, takes_step: bool) -> Optimizer:
    """Build the optimizer on small tensors, to find wrong arguments before the run starts.

    Args:
        optimizer: function that creates the optimizer from parameters.
        skeleton: model on the meta device, whose trainable parameters define the kinds of tensors.
        takes_step: also take a step, with small gradients; some optimizers check their arguments only then.

    Raises:
        ValueError: the learning rate is 0, or a step results in weights that are not finite.
    """
    matrices = hidden_matrices(skeleton)
    kinds = dict.fromkeys((p in matrices, p.dim()) for p in skeleton.parameters() if p.requires_grad)
    groups = [{"params": [nn.Parameter(torch.full([8] * dim, 0.1))], MATRICES: kind} for kind, dim in kinds]
    level = _logger.level
    _logger.setLevel(logging.WARNING)  # the optimizer of the run prints what it trains
    try:
        built: Any = optimizer(groups)
        if not any(group["lr"] for group in built.param_groups):
            raise ValueError("a learning rate of 0 trains nothing")
        if takes_step:
            for group in groups:
                group["params"][0].grad = torch.full_like(group["params"][0], 1e-3)  # type: ignore[index]
            if isinstance(built, KeepsTwoWeightSets):
                built.train()  # schedule-free optimizers require it
            built.step(lambda: torch.zeros(()))
            if not all(group["params"][0].isfinite().all() for group in groups):  # type: ignore[index]
                raise ValueError("a step makes weights infinite: is a learning rate or weight decay too large?")
    finally:
        _logger.setLevel(level)
    return built


_logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")


class _StatesOfParts(ChainMap[Tensor, Any]):
    """States of several optimizers, by parameter; what is set goes to the optimizer that has the parameter's."""

    def __getitem__(self, key: Tensor) -> Any:
        return self._of_part(key)[key]

    def __setitem__(self, key: Tensor, value: Any) -> None:
        self._of_part(key)[key] = value

    def _of_part(self, key: Tensor) -> MutableMapping[Tensor, Any]:
        for of_part in self.maps:
            if key in of_part:  # asked for another's, a part would add it
                return of_part
        raise KeyError(key)


class SplitOptimizer(Optimizer):
    """Optimizer composed of two: one for the weight matrices of hidden layers, another for all other weights.

    Muon, for example, takes only matrices, and is not meant for embeddings and output heads; AdamW trains those, norms
    and biases. For schedules, clipping and checkpoints the two are one optimizer.
    """

    def __init__(
        self, params: Iterable[dict[str, Any]], matrices: OptimizerCallable, others: OptimizerCallable
    ) -> None:
        """Build both optimizers.

        Args:
            params: parameter groups, each with the key ``MATRICES``, as ``configure_optimizers`` creates them.
            matrices: optimizer of the weight matrices of hidden layers.
            others: optimizer of all other weights; not used if there are none, as with most adapters.

        Raises:
            RecipeError: no weight matrix of a hidden layer is trainable.
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
        self.state = self._states()
        rank_zero_info("optimizers: " + "; ".join(_describe(part) for part in self.parts))

    def _groups(self) -> list[dict[str, Any]]:
        # The same dictionary objects as in the parts: the parts read what a schedule writes into them.
        return [group for part in self.parts for group in part.param_groups]

    def _states(self) -> Any:
        return _StatesOfParts(*(part.state for part in self.parts))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step both optimizers, after the closure has computed the gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss

    def state_dict(self) -> StateDict:
        """State dicts of both optimizers, as their own methods return them: their state may be quantized."""
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load the state dict of each optimizer."""
        for part, saved in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(saved)
        self.param_groups, self.state = self._groups(), self._states()


def _describe(optimizer: Optimizer) -> str:
    tensors = [p for group in optimizer.param_groups for p in group["params"]]
    return f"{type(optimizer).__name__} trains {sum(p.numel() for p in tensors):,} weights in {len(tensors)} tensors"
