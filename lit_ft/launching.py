"""What a run in several processes says: whether they are as many as the recipe wants, and which of them failed."""

import os
import re

import torch.distributed as dist
from lightning.fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lit_ft.errors import RecipeError


def check_world_size(trainer: Trainer) -> None:
    """Compare the processes that torchrun or SLURM has started with those of the recipe.

    Raises:
        RecipeError: they differ; Lightning would train in each process by itself, or wait for some that never come.
    """
    started = next((e().world_size() for e in (TorchElasticEnvironment, SLURMEnvironment) if e.detect()), None)
    if started not in (None, trainer.world_size):
        raise RecipeError(
            f"{started} processes were started, but trainer.devices x trainer.num_nodes = {trainer.world_size}; set "
            "trainer.devices to the processes of one node and trainer.num_nodes to the number of nodes"
        )


def rank_prefix() -> str:
    """``rank 1: `` where this is one of several processes, else nothing."""
    if "LOCAL_RANK" not in os.environ and int(os.environ.get("SLURM_NTASKS", "1")) == 1:
        return ""
    known = dist.is_available() and dist.is_initialized()
    return f"rank {dist.get_rank() if known else getattr(rank_zero_only, 'rank', 0)}: "


def blame(error: Exception) -> str | None:
    """What to say of an error that only means that another rank is gone or late; None of any other."""
    text = " ".join(str(error).split())
    if not isinstance(error, dist.DistError) and not (
        isinstance(error, RuntimeError) and re.search("gloo/|NCCL|c10d|TCPStore", text)
    ):
        return None
    # Less the place in torch's sources, and its advice.
    text = re.sub(r"\[/\S+\] |\. This is typically .*", "", text)
    if re.search("clients joined|trying to connect", text):
        return (
            f"the ranks have not found one another ({text}); start the same command on every node, and let each reach "
            "MASTER_ADDR:MASTER_PORT"
        )
    if re.search("time(d )?out", text, re.IGNORECASE):
        return (
            f"another rank has not come in time ({text}); it hangs, or needs longer: then give the strategy's class a "
            "timeout, e.g. --trainer.strategy DDPStrategy --trainer.strategy.timeout 1:00:00"
        )
    if re.search("closed|reset by peer|broken pipe|remote process exited", text, re.IGNORECASE):
        return f"another rank has ended, and said why if it could; this one cannot go on without it ({text})"
    return None
