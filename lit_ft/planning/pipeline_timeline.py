"""Timeline of a pipeline step: the order of work of each rank, as torch computes it, with start and end times.

It assumes that communication takes no time and that all stages take equally long; ranks compute or wait.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

from torch.distributed.pipelining.schedules import get_schedule_class

from lit_ft.errors import RecipeError
from lit_ft.strategies.parallel.pipeline_parallel import stages_of, stages_per_rank

FORWARD, BACKWARD, INPUT, WEIGHT = "F", "B", "I", "W"
"""Kinds of work: a forward pass, a full backward pass, and its two halves: gradients of inputs, and of weights."""

DURATIONS: Mapping[str, float] = MappingProxyType({FORWARD: 1, BACKWARD: 2, INPUT: 1, WEIGHT: 1})
"""Durations in forward passes. A backward pass has two matrix products for each one of the forward pass. If weights are
frozen it has little more than one, and WEIGHT takes almost no time."""


class Work(NamedTuple):
    """One micro-batch on one stage."""

    kind: str
    """One of FORWARD, BACKWARD, INPUT, WEIGHT."""
    stage: int
    micro_batch: int
    start: float
    end: float


def order(schedule: str, ranks: int, micro_batches: int) -> list[list[tuple[str, int, int]]]:
    """Work of each rank as (kind, stage, micro-batch), in torch's order.

    Args:
        schedule: name in ``pipeline_parallel.SCHEDULES``.
        ranks: number of pipeline ranks.
        micro_batches: number of micro-batches that a packed batch is split into.

    Raises:
        RecipeError: the schedule does not support this number of micro-batches.
    """
    per_rank = stages_per_rank(schedule)
    # torch computes the order of all ranks from the stages of one rank.
    stages = [
        SimpleNamespace(stage_index=k, num_stages=per_rank * ranks, group_size=ranks, group_rank=0, submod=None)
        for k in stages_of(0, ranks, schedule)
    ]
    make = get_schedule_class(schedule)
    try:
        built = make(stages[0] if per_rank == 1 else stages, micro_batches, loss_fn=lambda *_: None)
    except ValueError as error:
        raise RecipeError(f"trainer.strategy schedule={schedule}: {error}") from error
    return [_work_of(built.pipeline_order[rank], is_in_order=per_rank == 1) for rank in range(ranks)]


def _work_of(actions: Sequence[Any], is_in_order: bool) -> list[tuple[str, int, int]]:
    work, forwards = [], 0
    for action in actions:
        for part in () if action is None else action.sub_actions or (action,):
            kind, micro_batch = part.computation_type.value, part.microbatch_index
            if kind == FORWARD and is_in_order:  # torch 2.13 counts 1F1B's micro-batches on the last rank from 1
                micro_batch, forwards = forwards, forwards + 1
            if kind in DURATIONS:
                work.append((kind, part.stage_index, micro_batch))
    return work


def timeline(schedule: str, ranks: int, micro_batches: int) -> list[list[Work]]:
    """Work of each rank with start and end times, each as early as possible.

    Args:
        schedule: name in ``pipeline_parallel.SCHEDULES``.
        ranks: number of pipeline ranks.
        micro_batches: number of micro-batches that a packed batch is split into.

    Raises:
        RecipeError: the schedule does not support this number of micro-batches.
    """
    waiting = [list(reversed(of_rank)) for of_rank in order(schedule, ranks, micro_batches)]
    last = stages_per_rank(schedule) * ranks - 1
    table: list[list[Work]] = [[] for _ in waiting]
    ends: dict[tuple[str, int, int], float] = {}
    while any(waiting):
        before = len(ends)
        for done, todo in zip(table, waiting, strict=True):
            while todo and all(need in ends for need in _needs(*todo[-1], last)):
                kind, stage, micro_batch = todo.pop()
                free = done[-1].end if done else 0.0
                start = max([free, *(ends[need] for need in _needs(kind, stage, micro_batch, last))])
                done.append(Work(kind, stage, micro_batch, start, start + DURATIONS[kind]))
                # The previous stage waits for gradients of inputs: both BACKWARD and INPUT compute them.
                ends[INPUT if kind == BACKWARD else kind, stage, micro_batch] = done[-1].end
        assert len(ends) > before, "torch's order waits for itself"
    return table


def _needs(kind: str, stage: int, micro_batch: int, last: int) -> list[tuple[str, int, int]]:
    if kind == FORWARD:
        return [(FORWARD, stage - 1, micro_batch)] if stage > 0 else []
    if kind == WEIGHT:
        return [(INPUT, stage, micro_batch)]
    return [(FORWARD, stage, micro_batch), *([(INPUT, stage + 1, micro_batch)] if stage < last else [])]


def idle_fraction(table: Sequence[Sequence[Work]]) -> float:
    """Fraction of the step's time that ranks wait, averaged over ranks."""
    length = max(work.end for of_rank in table for work in of_rank)
    busy = sum(work.end - work.start for of_rank in table for work in of_rank)
    return 1 - busy / (length * len(table))


def most_in_flight(of_rank: Sequence[Work]) -> int:
    """Largest number of (stage, micro-batch) pairs of a rank between forward pass and completed backward pass."""
    most = now = 0
    for work in of_rank:
        now += {FORWARD: 1, BACKWARD: -1, WEIGHT: -1}.get(work.kind, 0)
        most = max(most, now)
    return most
