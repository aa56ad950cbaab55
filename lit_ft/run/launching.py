"""Communication between processes before the process group exists, and messages for errors of other ranks."""

import os
import re
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import count

import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment, SLURMEnvironment, TorchElasticEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lit_callbacks.lifecycle.heartbeats import is_about_another_rank

from lit_ft.errors import RecipeError
from lit_ft.internals import lightning as lightning_internals


def check_world_size(devices: int, num_nodes: int) -> None:
    """Compare the number of processes that were started with that of the recipe.

    Args:
        devices: number of ranks per node.
        num_nodes: number of nodes.

    Raises:
        RecipeError: they differ; Lightning would train in each process separately, or wait forever for missing ones.
    """
    launcher, world_size = _launcher(), devices * num_nodes
    if launcher is None:
        _check_rendezvous(num_nodes)
        _check_not_alone(world_size)
    elif (started := launcher.world_size()) != world_size:
        raise RecipeError(f"{started} processes were started, but devices x num_nodes = {world_size}; {_SIZES}")
    if launcher is not None and launcher.global_rank() == 0:
        _warn_of_restarts()


_SIZES = "set devices to the processes of one node and num_nodes to the number of nodes"


def _meets_in_torchruns_store() -> bool:
    """Whether torchrun serves the store in which the ranks meet."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _warn_of_restarts() -> None:
    """Warn of restarts by torchrun in its own store, where ranks find addresses of ranks that have ended.

    See https://github.com/pytorch/pytorch/issues/135712.
    """
    if (restarts := _number("TORCHELASTIC_MAX_RESTARTS")) and _meets_in_torchruns_store():
        rank_zero_warn(
            f"torchrun --max-restarts {restarts}: restarted ranks meet in torchrun's store, where they may find the "
            "addresses of the ranks that have ended and wait for them; start it with "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment and with --rdzv-backend c10d"
        )


def _check_rendezvous(num_nodes: int) -> None:
    """Refuse several nodes that cannot meet: Lightning would take each for node 0, at a port of its own choice."""
    given = {
        "NODE_RANK": "NODE_RANK" in os.environ or "GROUP_RANK" in os.environ,
        **{name: name in os.environ for name in ("MASTER_ADDR", "MASTER_PORT")},
    }
    if num_nodes > 1 and (missing := [name for name, is_set in given.items() if not is_set]):
        raise RecipeError(
            f"num_nodes={num_nodes} needs {', '.join(missing)}, not set here; set NODE_RANK to each node's number, "
            "from 0, and MASTER_ADDR and MASTER_PORT to the address of node 0 and a free port there, or start the "
            "processes with torchrun or SLURM; on one machine set num_nodes to 1"
        )


def _check_not_alone(world_size: int) -> None:
    """Refuse the variables of a launcher that Lightning does not read: each of its processes would train alone."""
    if "LOCAL_RANK" not in os.environ and "NODE_RANK" not in os.environ and (rank := _number("RANK")) > 0:
        raise RecipeError(
            f"RANK={rank} says that this is one of several processes, but without NODE_RANK it would work alone; start "
            f"it with torchrun, or, where RANK counts the nodes, set NODE_RANK to it; {_SIZES}"
        )
    if world_size == 1 and (rank := _number("LOCAL_RANK")) > 0:
        raise RecipeError(
            f"LOCAL_RANK={rank} says that this is one of several processes, but devices x num_nodes = 1, and rank 0, "
            "which prints and writes files, would be missing; unset LOCAL_RANK, or set devices to the processes"
        )
    for name in ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"):
        if (started := _number(name)) > world_size:
            raise RecipeError(
                f"{name}={started} says that {started} processes work together, but devices x num_nodes = "
                f"{world_size}, so that each would work alone; {_SIZES}, or unset {name}"
            )


def _number(variable: str) -> int:
    """Value of an environment variable; 0 where it is not set or no number."""
    value = os.environ.get(variable, "")
    return int(value) if value.isdecimal() else 0


def _launcher() -> TorchElasticEnvironment | SLURMEnvironment | None:
    """Environment of torchrun or SLURM; None where neither has started this process."""
    return next((kind() for kind in (TorchElasticEnvironment, SLURMEnvironment) if kind.detect()), None)


def starts_ranks(trainer: Trainer) -> bool:
    """Whether Lightning will start the other ranks of this machine: not torchrun, SLURM or the user."""
    return trainer.num_devices > 1 and _launcher() is None and "LOCAL_RANK" not in os.environ


def is_rank_zero() -> bool:
    """Whether this process is rank 0; works before there is a trainer."""
    if (launcher := _launcher()) is not None:
        return launcher.global_rank() == 0
    environment = LightningEnvironment()
    return environment.node_rank() == 0 and environment.local_rank() == 0


_exchanges = count()
_stores: list[dist.Store] = []
"""Open stores: other processes can read from a store only while its server exists."""


def from_rank_zero(choose: Callable[[], str], num_nodes: int, timeout: timedelta) -> str:
    """Broadcast a string from rank 0 to all processes that a launcher or a user has started, without a process group.

    Args:
        choose: function that returns the string; called on rank 0 only.
        num_nodes: ``trainer.num_nodes``; without a launcher, one process of each node takes part.
        timeout: maximum wait for the other processes.

    Raises:
        RecipeError: there are several nodes, and a variable by which they meet is not set.
        DistStoreError: the other processes have not connected in time.
    """
    launcher = _launcher()
    if launcher is None:
        _check_rendezvous(num_nodes)
    environment = launcher or LightningEnvironment()
    rank, world = (launcher.global_rank(), launcher.world_size()) if launcher else (environment.node_rank(), num_nodes)
    if world == 1:
        return choose()
    # torchrun may serve a store at this address; otherwise rank 0 does, and the process group will share it.
    is_server = rank == 0 and not _meets_in_torchruns_store()
    address, port = environment.main_address, environment.main_port
    store = dist.TCPStore(address, port, None, is_server, timeout, wait_for_workers=False, multi_tenant=True)
    _stores.append(store)
    # A store of torchrun outlives restarts. Each node counts these by itself, so the count is no key in a new store.
    restarts = _number("TORCHELASTIC_RESTART_COUNT") if _meets_in_torchruns_store() else 0
    key = f"lit_ft/{restarts}/{next(_exchanges)}"
    if rank == 0:
        value = choose()
        store.set(key, value)
        # If rank 0 ended before the others have read the value, its store would end too.
        _wait_for(store, [f"{key}/{other}" for other in range(1, world)], timeout)
    else:
        _wait_for(store, [key], timeout)
        value = bytes(store.get(key)).decode()
        store.set(f"{key}/{rank}", "read")
    return value


def meet(num_nodes: int, timeout: timedelta) -> None:
    """Wait for the other nodes where a user has started one process on each.

    A signal ends this wait, but none ends that of a process group.
    """
    if _launcher() is None and "LOCAL_RANK" not in os.environ:
        from_rank_zero(str, num_nodes, timeout)


def _wait_for(store: dist.Store, keys: list[str], timeout: timedelta) -> None:
    # Not store.wait: no signal interrupts it.
    deadline = time.monotonic() + timeout.total_seconds()
    while not store.check(keys):
        if time.monotonic() > deadline:
            come = sum(store.check([key]) for key in keys)
            raise dist.DistStoreError(f"after {timeout} {1 + come}/{1 + len(keys)} clients joined")
        time.sleep(0.05)


def rank_prefix() -> str:
    """Prefix of messages, e.g. ``rank 1: ``; empty for a single process."""
    if "LOCAL_RANK" not in os.environ and int(os.environ.get("SLURM_NTASKS", "1")) == 1:
        return ""
    known = dist.is_available() and dist.is_initialized()
    return f"rank {dist.get_rank() if known else lightning_internals.rank()}: "


def explain_distributed_error(error: Exception) -> str | None:
    """Message for an error that another rank caused by ending or being late, or a port in use; None for any other."""
    if isinstance(error, dist.DistNetworkError) and "EADDRINUSE" in str(error):
        return (
            f"MASTER_PORT={os.environ.get('MASTER_PORT')} is in use on this machine, maybe by another run; set it to a "
            "free port, the same on every node, or leave it out on one machine"
        )
    if not is_about_another_rank(error):
        return None
    # Without the location in torch's sources and torch's advice.
    text = re.sub(r"\[/\S+\] |\. This is typically .*", "", " ".join(str(error).split()))
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
