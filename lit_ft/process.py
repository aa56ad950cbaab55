"""What this process knows of the run: its seed, and its place among the data-parallel replicas."""

import os
from typing import Any, NamedTuple


def seed() -> int:
    """The recipe's ``seed_everything``; 0 where nothing was seeded."""
    return int(os.environ.get("PL_GLOBAL_SEED", "0"))


def is_seeded() -> bool:
    """Whether the recipe asks for reproducible draws."""
    return "PL_GLOBAL_SEED" in os.environ


class DataParallel(NamedTuple):
    """The ranks that train on different data."""

    size: int
    """Number of data-parallel replicas."""
    rank: int
    """The replica that this process belongs to, from 0."""


def data_parallel(trainer: Any) -> DataParallel:
    """Data-parallel size and rank of this process; 1 and 0 without a trainer."""
    # A parallel strategy says there which share of the data is whose, whatever else it splits.
    place = getattr(getattr(trainer, "strategy", None), "distributed_sampler_kwargs", None)
    return DataParallel(place["num_replicas"], place["rank"]) if place else DataParallel(1, 0)


def model_parallel_size(trainer: Any) -> int:
    """Number of ranks that compute the same share of the data, each with a part of the model."""
    return trainer.world_size // data_parallel(trainer).size
