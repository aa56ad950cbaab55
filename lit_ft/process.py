"""Seed of the run, and data-parallel size and rank of this process."""

import os
from typing import NamedTuple

import torch
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.strategies import ParallelStrategy

from lit_ft.internals import lightning as lightning_internals


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
    return None if trainer is None else lightning_internals.datamodule_of(trainer)


def model_parallel_size(trainer: Trainer) -> int:
    """Number of ranks that share the model of one data-parallel replica."""
    return trainer.world_size // data_parallel(trainer).size


def seed_micro_batch(trainer: Trainer, batch_idx: int) -> None:
    """Seed torch by run, step, micro-batch and replica: a resumed run draws the same numbers, other data others."""
    if is_seeded():
        draws = (seed(), trainer.global_step, batch_idx, data_parallel(trainer).rank)
        torch.manual_seed(hash(draws) % 2**63)
