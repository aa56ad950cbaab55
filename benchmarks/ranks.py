"""Execution of a function in several forked processes that can form a process group."""

import os
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp
from lightning.fabric.plugins.environments.lightning import find_free_network_port


def on_ranks(world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Run a function on several ranks and return its results; Lightning finds its rank there as with ``torchrun``.

    Args:
        world: number of processes.
        function: function that each process runs; torch raises an error if one of them does.
        arguments: positional arguments of the function.
    """
    port = find_free_network_port()
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_run, (world, port, folder, function, arguments), nprocs=world, start_method="fork")
        return [pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(world)]


def _run(rank: int, world: int, port: int, folder: str, function: Callable[..., Any], arguments: Any) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "NODE_RANK": 0}
    os.environ |= {name: str(value) for name, value in {**place, "MASTER_PORT": port, "GROUP_RANK": 0}.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "benchmarks"}
    (Path(folder) / str(rank)).write_bytes(pickle.dumps(function(*arguments)))
