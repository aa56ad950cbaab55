"""``bandwidth``: how fast the ranks of a machine or a cluster exchange tensors, and what that means for a strategy.

Bandwidths are those of nccl-tests (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md): ``algbw`` is bytes by seconds;
``busbw`` is what each rank's link carries, whatever the number n of ranks: ``algbw x 2(n-1)/n`` for all-reduce,
``algbw x (n-1)/n`` for all-gather and reduce-scatter, with the bytes of the whole tensor.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment
from lightning.fabric.strategies import DDPStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from lit_ft.errors import RecipeError
from lit_ft.recipe.parser import RecipeParser

WARM_UP = 3
"""Exchanges before the measured ones: connections are made and buffers allocated in them."""


def run(arguments: list[str]) -> None:
    """Parse and measure."""
    parser = RecipeParser(prog="python -m lit_ft bandwidth", description=(bandwidth.__doc__ or "").split("\n")[0])
    parser.add_function_arguments(bandwidth, as_group=False)
    bandwidth(**parser.parse_args(arguments[1:]).as_dict())


def bandwidth(
    devices: int | None = None,
    num_nodes: int | None = None,
    backend: str | None = None,
    sizes_mib: list[float] = [1, 16, 64],  # noqa: B006
    repeats: int = 10,
    parameters: float | None = None,
    bytes_per_parameter: float = 2,
    timeout: timedelta = timedelta(minutes=2),
) -> None:
    """Measure all-reduce, all-gather and reduce-scatter between ranks.

    Args:
        devices: ranks on each node; by default those that torchrun or SLURM has started, else one per GPU, or 2.
        num_nodes: nodes, on each of which the command runs; by default those of torchrun or SLURM, else 1.
        backend: of torch.distributed; by default nccl on CUDA, gloo on CPU.
        sizes_mib: sizes of the whole tensor, in MiB of float32.
        repeats: measured exchanges of each size; their median is shown.
        parameters: of a model, e.g. 7e9: adds what a step of a strategy would spend on communication.
        bytes_per_parameter: of gradients and weights as they travel, 2 for bfloat16.
        timeout: how long a rank waits for the others.
    """
    found = _started()
    devices, num_nodes = devices or found[0], num_nodes or found[1]
    if devices * num_nodes < 2:
        raise RecipeError(
            f"devices={devices} x num_nodes={num_nodes} is one rank, which sends nothing; set --devices 2"
        )
    strategy = DDPStrategy(process_group_backend=backend, timeout=timeout)
    accelerator = "cuda" if torch.cuda.is_available() and backend != "gloo" else "cpu"
    fabric = Fabric(accelerator=accelerator, devices=devices, num_nodes=num_nodes, strategy=strategy)
    fabric.launch()
    rank_zero_info(
        f"{fabric.world_size} ranks ({num_nodes} x {devices}), {dist.get_backend()}, {fabric.device.type}, float32; "
        f"median of {repeats}, the slowest rank\n\n{'MiB':>8} {'':<14} {'ms':>9} {'algbw GB/s':>11} {'busbw GB/s':>11}"
    )
    last: dict[str, Measured] = {}
    for mib in sizes_mib:
        for name in COLLECTIVES:
            last[name] = one = measure(name, int(mib * 2**20), fabric.device, repeats)
            rank_zero_info(
                f"{mib:>8g} {name:<14} {one.seconds * 1e3:>9.3f} {one.algbw / 1e9:>11.3f} {one.busbw / 1e9:>11.3f}"
            )
    if parameters is not None:
        rank_zero_info("\n" + describe_steps(last, parameters, bytes_per_parameter))
    dist.destroy_process_group()


def _started() -> tuple[int, int]:
    """Ranks per node and nodes, as far as the environment says."""
    if TorchElasticEnvironment.detect():
        local = int(os.environ["LOCAL_WORLD_SIZE"])
        return local, int(os.environ["WORLD_SIZE"]) // local
    if SLURMEnvironment.detect():
        return int(os.environ.get("SLURM_NTASKS_PER_NODE", "1")), int(os.environ.get("SLURM_NNODES", "1"))
    return torch.cuda.device_count() or 2, 1


# torch 2.13 has these names for what all_gather_into_tensor and reduce_scatter_tensor were.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

COLLECTIVES: dict[str, tuple[Callable[[Tensor, Tensor], Any], int]] = {
    "all-reduce": (lambda whole, share: dist.all_reduce(whole), 2),
    "all-gather": (lambda whole, share: _all_gather(whole, share), 1),
    "reduce-scatter": (lambda whole, share: _reduce_scatter(share, whole), 1),
}
"""What is measured, and how often each element crosses n - 1 of n links."""


@dataclass(frozen=True)
class Measured:
    """One collective at one size."""

    seconds: float
    algbw: float
    """Bytes of the whole tensor a second."""
    busbw: float
    """Bytes a second that leave each rank."""


def measure(name: str, size: int, device: torch.device, repeats: int) -> Measured:
    """The median time of a collective over the ranks of the process group, each time that of the slowest.

    Args:
        name: of ``COLLECTIVES``.
        size: bytes of the whole tensor; rounded down to what the ranks can share.
        device: where the tensor is.
        repeats: measured exchanges.
    """
    exchange, crossings = COLLECTIVES[name]
    ranks = dist.get_world_size()
    share = torch.zeros(max(1, size // 4 // ranks), device=device)
    whole = torch.zeros(share.numel() * ranks, device=device)
    times = torch.zeros(repeats, dtype=torch.float64, device=device)
    for i in range(-WARM_UP, repeats):
        dist.barrier()
        _finish(device)
        started = time.perf_counter()
        exchange(whole, share)
        _finish(device)
        if i >= 0:
            times[i] = time.perf_counter() - started
    dist.all_reduce(times, dist.ReduceOp.MAX)
    seconds = median(times.tolist())
    algbw = whole.numel() * whole.element_size() / seconds
    return Measured(seconds, algbw, algbw * crossings * (ranks - 1) / ranks)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def describe_steps(measured: dict[str, Measured], parameters: float, bytes_per_parameter: float) -> str:
    """Seconds of communication in an optimizer step, if nothing overlaps, at measured bandwidths.

    Rajbhandari et al. 2020 (arXiv:1910.02054, section 7): data parallelism and ZeRO-1 and 2 exchange twice the model,
    by an all-reduce or its two halves; ZeRO-3 and FSDP gather the weights for the forward and the backward pass and
    scatter the gradients, three times the model.
    """
    size = parameters * bytes_per_parameter
    twice = size / measured["all-reduce"].algbw
    thrice = size * (2 / measured["all-gather"].algbw + 1 / measured["reduce-scatter"].algbw)
    return (
        f"{parameters:,.0f} parameters of {bytes_per_parameter:g} bytes, all of them trained: a step exchanges for "
        f"{twice:.3g} s with DDP, ZeRO-1 or ZeRO-2 (2 x the model), {thrice:.3g} s with ZeRO-3 or FSDP (3 x), less "
        "what overlaps with computing"
    )
