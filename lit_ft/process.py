"""Seed of the run, data-parallel size and rank of this process, its CPU cores and threads, and its signals."""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy, ParallelStrategy
from lit_callbacks.internals.lightning_internals import attributes_of


def seed() -> int:
    """Seed of the run, ``seed_everything`` of the recipe; 0 where nothing was seeded."""
    return int(os.environ.get("PL_GLOBAL_SEED", "0"))


def is_seeded() -> bool:
    """Whether the recipe sets a seed."""
    return "PL_GLOBAL_SEED" in os.environ


class DataParallel(NamedTuple):
    """Data-parallel size and rank of a process."""

    size: int
    """Number of data-parallel replicas."""
    rank: int
    """Index of the replica that the process belongs to, from 0."""


def data_parallel(trainer: Trainer | None) -> DataParallel:
    """Data-parallel size and rank of this process; 1 and 0 without a trainer."""
    # Every parallel strategy sets it to the split of the data, also where it splits the model.
    strategy = None if trainer is None else trainer.strategy
    split = strategy.distributed_sampler_kwargs if isinstance(strategy, ParallelStrategy) else None
    return DataParallel(split["num_replicas"], split["rank"]) if split else DataParallel(1, 0)


def datamodule_of(trainer: Trainer | None) -> LightningDataModule | None:
    """Data module of a trainer; None without a trainer, before a run, and where bare loaders were given."""
    return None if trainer is None else attributes_of(trainer).datamodule


def model_parallel_size(trainer: Trainer) -> int:
    """Number of ranks that share the model of one data-parallel replica."""
    return trainer.world_size // data_parallel(trainer).size


def leads_replica(trainer: Trainer) -> bool:
    """Whether this rank is the first of those that share the model of its data-parallel replica, and so its data."""
    strategy = trainer.strategy
    if not isinstance(strategy, ModelParallelStrategy):
        return True
    names, coordinate = strategy.device_mesh.mesh_dim_names, strategy.device_mesh.get_coordinate()
    assert names is not None
    assert coordinate is not None, "every rank is in the mesh"
    return not any(at for name, at in zip(names, coordinate, strict=True) if name != "data_parallel")


def seed_torch(number: int) -> None:
    """Seed torch's generators: that of the CPU and, where there is an accelerator, those of its devices."""
    # For each kind of accelerator that has not started, torch.manual_seed formats the stack of calls.
    set_seed = torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed
    set_seed(number)


def seed_micro_batch(trainer: Trainer, batch_idx: int) -> None:
    """Seed torch by run, step, micro-batch and replica: a resumed run draws the same numbers, other data others."""
    if is_seeded():
        draws = (seed(), trainer.global_step, batch_idx, data_parallel(trainer).rank)
        seed_torch(hash(draws) % 2**63)


# --- cores and threads -------------------------------------------------------------------------------

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Environment variables by which a user sets the number of threads."""
_was_lowered = False


def started_at() -> float:
    """Time of the start of this process, as ``time.time()`` counts; where ``/proc`` is missing, of lit_ft's import."""
    if not (stat := Path("/proc/self/stat")).is_file():
        return _IMPORTED
    ticks = int(stat.read_text().rpartition(")")[2].split()[19])  # since boot; see proc(5), starttime
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


_IMPORTED = time.time()


def return_freed_memory() -> None:
    """Let the C library give freed blocks of a MiB or more back to the system at once, where it is glibc.

    It would keep blocks of up to 32 MiB for later ones of their size, which tensors of a model rarely have.
    """
    mmap_threshold = -3  # M_MMAP_THRESHOLD of malloc.h; setting it also keeps glibc from raising it
    libc = ctypes.CDLL(None)
    if sys.platform == "linux" and hasattr(libc, "mallopt"):
        libc.mallopt(mmap_threshold, 2**20)


def available_cores() -> int:
    """Number of CPU cores that this process may use: its affinity, and the quota of its control group."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, round(_quota(Path("/sys/fs/cgroup")) or cores)))


def _quota(folder: Path) -> float | None:
    """CPU cores that a control group (version 2 or 1) allows; None without a limit."""
    if (version_2 := folder / "cpu.max").is_file():
        quota, period = version_2.read_text().split()
    elif (version_1 := folder / "cpu" / "cpu.cfs_quota_us").is_file():
        quota, period = version_1.read_text(), (folder / "cpu" / "cpu.cfs_period_us").read_text()
    else:
        return None
    return None if quota == "max" or int(quota) <= 0 else int(quota) / int(period)


def free_cores(available: int, machine: int, load: float) -> int:
    """Number of cores to compute on, at least 1: those that this process may use, and that others leave free.

    Args:
        available: cores that this process may use.
        machine: cores of the machine, which ``load`` is about.
        load: mean number of other processes that run or wait for a core.
    """
    return max(1, min(available, round(machine - load)))


def _load_of_others() -> float:
    """Number of other threads that run or wait for a core: the mean of the last minute, or fewer if fewer do now."""
    if not hasattr(os, "getloadavg"):
        return 0.0
    mean = os.getloadavg()[0]
    if not (now := Path("/proc/loadavg")).is_file():
        return mean
    # What ended just now is still in the mean: a fit after a check would find the cores busy.
    running = int(now.read_text().split()[3].split("/")[0])
    return min(mean, max(running - 1, 0))


def choose_threads() -> None:
    """Let torch use the cores that are free, unless the user sets a number; for a process that just started.

    Threads that share a core wait for each other by spinning, which burns many times the computation itself.
    """
    global _was_lowered
    if _sets_threads():
        return
    available = max(1, available_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    threads = min(torch.get_num_threads(), free_cores(available, os.cpu_count() or 1, _load_of_others()))
    _was_lowered = threads < min(available, torch.get_num_threads())
    torch.set_num_threads(threads)


def choose_threads_of_ranks(ranks: int) -> None:
    """Share the cores that are free among this process and the ranks that Lightning is about to start on this machine.

    They inherit ``OMP_NUM_THREADS``. Lightning would set it too, to their share of all cores, free or not.
    """
    global _was_lowered
    if _sets_threads():
        return
    available = available_cores()
    threads = max(1, free_cores(available, os.cpu_count() or 1, _load_of_others()) // ranks)
    _was_lowered = threads < max(1, available // ranks)
    torch.set_num_threads(threads)
    os.environ["OMP_NUM_THREADS"] = str(threads)


def _sets_threads() -> bool:
    return any(name in os.environ for name in THREAD_VARIABLES)


def resume_threads(threads: int | None) -> None:
    """Compute with the threads of the stopped run, unless the user sets a number: sums are rounded by their number."""
    if threads is not None and not _sets_threads():
        torch.set_num_threads(min(threads, available_cores()))


def describe_threads() -> str:
    """Text with the number of threads that torch computes with on a CPU."""
    count = torch.get_num_threads()
    reason = ", as other processes use the machine" if _was_lowered else ""
    return f"{count} thread{'s' * (count != 1)}{reason}"


@contextmanager
def held_signals() -> Iterator[Callable[[], None]]:
    """Context in which Ctrl-C and SIGTERM only take effect when the yielded function is called, and at its end.

    A handler that raises anywhere breaks locks of a pool of processes, which then fails with another error.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    received: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda got, _: received.append(got)) for number in numbers}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def deliver() -> None:
        if received:
            restore()
            signal.raise_signal(received.pop(0))

    try:
        yield deliver
        deliver()
    finally:
        restore()
