"""The ``bandwidth`` command: measure collectives between ranks, and estimate the communication time of strategies.

Bandwidths are defined as in nccl-tests (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md): ``algbw`` is bytes of the
full tensor per second; ``busbw`` is the load on each rank's link, comparable for any number n of ranks:
``algbw x 2(n-1)/n`` for all-reduce, ``algbw x (n-1)/n`` for all-gather and reduce-scatter.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from statistics import median

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment
from lightning.fabric.strategies import DDPStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from lit_ft.errors import RecipeError
from lit_ft.recipe.parser import RecipeParser
from lit_ft.run.launching import check_world_size

WARM_UP = 3
"""Number of unmeasured exchanges at the beginning, which open connections and allocate buffers."""


def run(arguments: list[str]) -> None:
    """Parse the options and measure."""
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
        devices: number of ranks per node; by default those that torchrun or SLURM has started, else one per GPU, or 2.
        num_nodes: number of nodes; the command runs on each of them; by default that of torchrun or SLURM, else 1.
        backend: backend of torch.distributed; by default nccl on CUDA, gloo on CPU.
        sizes_mib: sizes of the full tensor, in MiB of float32.
        repeats: number of measured exchanges per size; their median is printed.
        parameters: number of parameters of a model, e.g. 7e9; adds the communication time of an optimizer step.
        bytes_per_parameter: bytes per parameter that gradients and weights are sent with, 2 for bfloat16.
        timeout: maximum time that a rank waits for the others.

    Raises:
        RecipeError: there is one rank, or other processes were started than ``devices`` and ``num_nodes`` say.
    """
    started = _started()
    devices, num_nodes = devices or started[0], num_nodes or started[1]
    if devices * num_nodes < 2:
        raise RecipeError(
            f"devices={devices} x num_nodes={num_nodes} is one rank, which sends nothing; set --devices 2"
        )
    check_world_size(devices, num_nodes)
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
    """Default number of ranks per node and of nodes, from torchrun, SLURM or the GPUs of this machine."""
    if TorchElasticEnvironment.detect():
        local = int(os.environ["LOCAL_WORLD_SIZE"])
        return local, int(os.environ["WORLD_SIZE"]) // local
    if SLURMEnvironment.detect():
        return int(os.environ.get("SLURM_NTASKS_PER_NODE", "1")), int(os.environ.get("SLURM_NNODES", "1"))
    return torch.cuda.device_count() or 2, 1


# torch 2.13 renamed all_gather_into_tensor and reduce_scatter_tensor to these.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

COLLECTIVES: dict[str, tuple[Callable[[Tensor, Tensor], object], int]] = {
    "all-reduce": (lambda whole, share: dist.all_reduce(whole), 2),
    "all-gather": (lambda whole, share: _all_gather(whole, share), 1),
    "reduce-scatter": (lambda whole, share: _reduce_scatter(share, whole), 1),
}
"""Measured collectives, each with its factor c of ``busbw = algbw x c(n-1)/n``."""


@dataclass(frozen=True)
class Measured:
    """Measurement of one collective at one size."""

    seconds: float
    algbw: float
    """Bytes of the full tensor per second."""
    busbw: float
    """Bytes per second that each rank sends."""


def measure(name: str, size: int, device: torch.device, repeats: int) -> Measured:
    """Measure a collective over the process group: the median time of the slowest rank.

    Args:
        name: key of ``COLLECTIVES``.
        size: bytes of the full tensor; rounded down to a multiple of 4 bytes times the number of ranks.
        device: device of the tensor.
        repeats: number of measured exchanges.
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
    """Estimate the seconds of communication per optimizer step from measured bandwidths, without overlap.

    Rajbhandari et al. 2020 (arXiv:1910.02054, section 7): data parallelism, ZeRO-1 and ZeRO-2 exchange twice the model,
    by an all-reduce or its two halves; ZeRO-3 and FSDP gather the weights for the forward and the backward pass and
    reduce-scatter the gradients, three times the model.
    """
    size = parameters * bytes_per_parameter
    twice = size / measured["all-reduce"].algbw
    thrice = size * (2 / measured["all-gather"].algbw + 1 / measured["reduce-scatter"].algbw)
    return (
        f"{parameters:,.0f} parameters of {bytes_per_parameter:g} bytes, all of them trained: a step exchanges for "
        f"{twice:.3g} s with DDP, ZeRO-1 or ZeRO-2 (2 x the model), {thrice:.3g} s with ZeRO-3 or FSDP (3 x), less "
        "what overlaps with computing"
    )
