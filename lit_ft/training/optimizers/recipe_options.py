"""Options of an optimizer that a resumed run takes from its recipe, where the recipe gives others than before."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from inspect import signature
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lit_ft.errors import RecipeError
from lit_ft.internals.torch import base_rates
from lit_ft.training.optimizers.configure import NO_WEIGHT_DECAY, PATTERN
from lit_ft.training.optimizers.schedules import WarmupSchedule

GIVEN = "given"
"""Key of a parameter group: its options as the recipe gave them, whatever a schedule has made of them since."""
_RATES = ("lr", "initial_lr", "max_lr", "min_lr")
"""Learning rates of a group: now, and those from which a schedule computes it."""
_TAKEN = ("betas", "eps", "weight_decay")
"""Other options that may change at any step: no state of an optimizer depends on them."""


class RecipeOptions:
    """Options of an optimizer as a recipe gives them, which its parameter groups record for runs that resume."""

    def __init__(self, optimizer: Optimizer, schedules: Iterable[object] = ()) -> None:
        """Record the options of a new optimizer, with its schedules."""
        self._of_schedules = [_schedule_options(one) for one in schedules]
        self._given = [_plain_options(group) for group in optimizer.param_groups]
        for group, given in zip(optimizer.param_groups, self._given, strict=True):
            group[GIVEN] = given

    def take_over(self, optimizer: Optimizer, schedules: Iterable[LRScheduler]) -> None:
        """Change what a checkpoint has restored where the recipe has changed since it was written, and say so.

        Learning rates, also those of schedules, become as many times larger or smaller as the recipe's own. A schedule
        of another length gives the next step its own rate, not that of the checkpoint. In a new run nothing happens.
        """
        schedules = list(schedules)
        rates = [one for schedule in schedules for one in base_rates(schedule)]
        bases = [group["initial_lr"] for group in optimizer.param_groups if "initial_lr" in group]
        for of_groups in rates if len(bases) == len(self._given) else ():
            of_groups[:] = bases  # the checkpoint has those of rank 0, whose groups may not be those of this stage
        taken: dict[str, None] = {}
        ignored: dict[str, None] = {}
        for index, (group, given) in enumerate(zip(optimizer.param_groups, self._given, strict=True)):
            before, group[GIVEN] = group.get(GIVEN), given
            if before is None:
                ignored["the checkpoint does not record what the recipe gave (an earlier version wrote it)"] = None
                continue
            old, new = _base_rate(before), _base_rate(given)
            if old != new:
                taken[f"lr is {new:g}, no longer {old:g}"] = None
                for name in group.keys() & set(_RATES):
                    group[name] = _scaled(group[name], old, new)
                for of_groups in rates:
                    of_groups[index] = _scaled(of_groups[index], old, new)
            for name in sorted(before.keys() & given.keys() - set(_RATES)):
                if before[name] != given[name] and name in _TAKEN:
                    group[name] = given[name]
                    taken[f"{name} is {given[name]}, no longer {before[name]}"] = None
                elif before[name] != given[name]:
                    ignored[f"{name}={given[name]} has no effect: its state was made with {before[name]}"] = None
        if taken:
            rank_zero_info(f"optimizer: by the recipe, {'; '.join(taken)}; all else is the checkpoint's")
        if ignored:
            rank_zero_warn(f"optimizer: {'; '.join(ignored)}; the resumed run goes on with the checkpoint's options")
        for schedule in schedules:
            if isinstance(schedule, WarmupSchedule):
                _follow(optimizer, schedule)
        for schedule, options in zip(schedules, self._of_schedules, strict=False):  # a run may have lost its schedule
            _say_what_has_no_effect(schedule, options)


def check_same_schedule(schedule: object, saved: Mapping[str, object]) -> None:
    """Refuse the state of a schedule of another class, by the names in it; versions only add some.

    Raises:
        RecipeError: it is that of another one.
    """
    here = set(_state_of(schedule))
    more, fewer = sorted(saved.keys() - here), sorted(here - saved.keys())
    if more and fewer:
        raise RecipeError(
            f"the checkpoint is that of another lr_scheduler than {type(schedule).__name__}, with {', '.join(more)} "
            f"and not {', '.join(fewer)}; resume with the lr_scheduler that wrote it, in config.yaml of its run"
        )


def _schedule_options(schedule: object) -> dict[str, Any]:
    """Arguments of a schedule's classes that are in its state, from where a resumed run takes them."""
    state = _state_of(schedule)
    names = (name for cls in type(schedule).__mro__[:-1] for name in signature(cls).parameters)
    options = {name: state[name] for name in names if name in state and name != "last_epoch"}
    return {name: sorted(one.elements()) if isinstance(one, Counter) else one for name, one in options.items()}


def _state_of(schedule: object) -> dict[str, Any]:
    return schedule.state_dict() if isinstance(schedule, LRScheduler) else {}


def _say_what_has_no_effect(schedule: LRScheduler, given: dict[str, Any]) -> None:
    now = _schedule_options(schedule)
    vain = [f"{name}={value} has no effect, {now[name]} holds" for name, value in given.items() if now[name] != value]
    if vain:
        rank_zero_warn(
            f"lr_scheduler: {'; '.join(vain)}: {type(schedule).__name__} goes on as in the checkpoint; those of "
            "lit_ft.schedules take changed options"
        )


def _follow(optimizer: Optimizer, schedule: WarmupSchedule) -> None:
    """Set the learning rates to those of a schedule at its place; a checkpoint has those of its own schedule."""
    before = optimizer.param_groups[0]["lr"]
    factor = schedule.factor(schedule.last_epoch)
    for group, base in zip(optimizer.param_groups, schedule.base_lrs, strict=True):
        group["lr"] = base * factor
    now = optimizer.param_groups[0]["lr"]
    if not math.isclose(now, before, rel_tol=1e-6):
        rank_zero_info(
            f"lr_scheduler: the learning rate goes on at {now:.4g}, by the recipe's schedule and run length; by those "
            f"of the checkpoint it was {before:.4g}"
        )


def _plain_options(group: dict[str, Any]) -> dict[str, Any]:
    """Options of a group that a checkpoint can hold as they are, and compare; tensors of one number as numbers."""
    others = ("params", "param_names", PATTERN, NO_WEIGHT_DECAY)
    options = {name: _without_tensors(value) for name, value in group.items() if name not in others}
    return {name: value for name, value in options.items() if _is_plain(value)}


def _without_tensors(value: Any) -> Any:
    """A copy in which tensors of one number are that number: a learning rate or betas, into which schedules write."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    return type(value)(map(_without_tensors, value)) if type(value) in (tuple, list) else value


def _is_plain(value: object) -> bool:
    return isinstance(value, bool | int | float | str | None) or (
        isinstance(value, tuple | list) and all(map(_is_plain, value))
    )


def _base_rate(options: dict[str, Any]) -> float:
    """Learning rate before a schedule, as it starts; 0 where a group has none."""
    return float(options.get("initial_lr", options.get("lr", 0.0)))


def _scaled(rate: Any, old: float, new: float) -> Any:
    if rate != old and old:
        return rate * (new / old)
    return torch.full_like(rate, new) if isinstance(rate, Tensor) else new
