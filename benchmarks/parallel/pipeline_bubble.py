"""Pipeline bubble: measured idle share of a step, compared with the formula.

    python -m benchmarks.parallel.pipeline_bubble

torch's schedules run in processes on this machine, with stages that take a fixed time: they sleep, so that four of them
do not compete for two cores, as they would not on separate devices. The backward pass sleeps separately for the
gradients of a stage's inputs and of its weights, which zero-bubble schedules split. Hidden states are small: the time
of a network link is not included.
"""

import argparse
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from benchmarks.compare import environment
from benchmarks.ranks import on_ranks
from lit_ft.errors import RecipeError
from lit_ft.planning.communication_formulas import bubble_fraction
from lit_ft.planning.pipeline_timeline import idle_fraction, timeline
from lit_ft.strategies.parallel.pipeline_parallel import SCHEDULES, stages_of, stages_per_rank

RANKS, MICRO_BATCHES, WIDTH = (2, 4), (2, 4, 8, 16), 8


class _SleepBack(torch.autograd.Function):
    """Identity whose backward pass sleeps."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stage: "SleepingStage") -> Tensor:
        ctx.stage = stage
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.stage.sleep()
        return grads[0].contiguous(), None  # gloo sends contiguous tensors only


class SleepingStage(nn.Module):
    """Pipeline stage with a fixed time for the forward pass, for the input gradients and for the weight gradients.

    Args:
        seconds: seconds of each.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight, self.seconds, self.busy = nn.Parameter(torch.zeros(WIDTH)), seconds, 0.0

    def sleep(self) -> None:
        """Sleep, and add the measured time to ``busy``."""
        start = time.perf_counter()
        time.sleep(self.seconds)
        self.busy += time.perf_counter() - start

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(1, WIDTH)`` to ``(1, WIDTH)``."""
        self.sleep()
        x = x if x.requires_grad else x.detach().requires_grad_()  # the first stage stands for several layers, too
        return _SleepBack.apply(x, self) + _SleepBack.apply(self.weight, self)


def measure(repeat: int, seconds: float) -> list[tuple[str, int, float | None]]:
    """Schedule, number of micro-batches and idle share of this rank; None if the schedule refuses the number."""
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    found: list[tuple[str, int, float | None]] = []
    for schedule in SCHEDULES:
        for count in MICRO_BATCHES:
            is_refused = count < ranks if schedule == "1F1B" else False
            try:
                timeline(schedule, ranks, count)
            except RecipeError:
                is_refused = True
            found.append((schedule, count, None if is_refused else _idle(schedule, ranks, count, repeat, seconds)))
    dist.destroy_process_group()
    return found


def _idle(schedule: str, ranks: int, count: int, repeat: int, seconds: float) -> float:
    total, rank = stages_per_rank(schedule) * ranks, dist.get_rank()
    modules = {k: SleepingStage(seconds / stages_per_rank(schedule)) for k in stages_of(rank, ranks, schedule)}
    one = torch.empty(1, WIDTH, device="meta", requires_grad=True)
    stages = [
        PipelineStage(module, k, total, torch.device("cpu"), input_args=one, output_args=one)
        for k, module in modules.items()
    ]
    make: Any = get_schedule_class(schedule)
    run = make(stages[0] if len(stages) == 1 else stages, count, loss_fn=lambda out, _: out.sum(), scale_grads=False)
    first, last = (torch.zeros(count, WIDTH),) if 0 in modules else (), total - 1 in modules
    idle = []
    for _ in range(repeat + 1):
        for module in modules.values():
            module.busy = 0.0
        dist.barrier()
        start = time.perf_counter()
        run.step(*first, target=torch.zeros(count) if last else None, return_outputs=False)
        dist.barrier()
        idle.append(1 - sum(module.busy for module in modules.values()) / (time.perf_counter() - start))
    return statistics.median(idle[1:])


def main() -> None:
    """Measure the schedules and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--repeat", type=int, default=2, help="steps of which the median is taken (2)")
    parser.add_argument(
        "--milliseconds", type=float, default=100, help="of a rank's forward pass; its backward pass takes two (100)"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| schedule | ranks | micro-batches | formula | timeline | measured |\n|---|---|---|---|---|---|")
    for ranks in RANKS:
        for places in zip(*on_ranks(ranks, measure, options.repeat, options.milliseconds / 1000), strict=True):
            schedule, count, idle = places[0]
            if idle is None:
                continue
            formula = bubble_fraction(ranks, count, stages_per_rank(schedule))
            table = idle_fraction(timeline(schedule, ranks, count))
            measured = statistics.mean(share for *_, share in places)
            print(f"| {schedule} | {ranks} | {count} | {formula:.1%} | {table:.1%} | {measured:.1%} |", flush=True)
    print(f"\n{environment()}")


if __name__ == "__main__":
    main()
