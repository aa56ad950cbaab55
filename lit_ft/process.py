"""What this process knows of the run: its seed, and its place among the data-parallel replicas."""

import os
from typing import Any


def seed() -> int:
    """The recipe's ``seed_everything``; 0 where nothing was seeded."""
    return int(os.environ.get("PL_GLOBAL_SEED", "0"))


def is_seeded() -> bool:
    """Whether the recipe asks for reproducible draws."""
    return "PL_GLOBAL_SEED" in os.environ


def replica(trainer: Any) -> tuple[int, int]:
    """Number of data-parallel replicas, and which one this process is; (1, 0) without a trainer."""
    # A parallel strategy says there which share of the data is whose, whatever else it splits.
    place = getattr(getattr(trainer, "strategy", None), "distributed_sampler_kwargs", None)
    return (place["num_replicas"], place["rank"]) if place else (1, 0)


def copies(trainer: Any) -> int:
    """How many ranks compute the same share of the data, each with a part of the model."""
    return trainer.world_size // replica(trainer)[0]
