"""Execution of a function in several forked processes that can form a process group."""

import ctypes
import gc
import os
import pickle
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def end_with_parent(parent: int) -> None:
    """Let the kernel kill this process, a fork of ``parent``, when ``parent`` ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def on_ranks(
    world: int, function: Callable[..., Any], *arguments: Any, timeout: float = 300, local_world: int | None = None
) -> list[Any]:
    """Run ``function(*arguments)`` in ``world`` processes, forked from this one; returns the result of each.

    Lightning finds its rank in the environment, as with ``torchrun``. All processes are killed if one of them runs for
    more than ``timeout`` seconds, or if the test is killed.

    Args:
        world: number of processes.
        function: function that each process runs; it may fit models with ``devices=world``.
        arguments: positional arguments of the function.
        timeout: time limit in seconds.
        local_world: number of processes per simulated node; None puts all on one node.
    """
    port = free_port()
    local = local_world or world
    with tempfile.TemporaryDirectory() as folder:
        processes = [_start(rank, world, local, port, Path(folder), function, arguments) for rank in range(world)]
        codes = _wait(processes, time.monotonic() + timeout)
        reports = [(Path(folder) / str(rank)) for rank in range(world)]
        failures = [
            f"--- rank {rank}, exit {code}\n{_error(path)}"
            for rank, (code, path) in enumerate(zip(codes, reports, strict=True))
            if code != 0
        ]
        assert not failures, "\n".join(failures)
        return [pickle.loads(path.read_bytes()) for path in reports]


@dataclass
class CasesOnRanks:
    """Cases that run one after another in one group of processes, and are reported one by one.

    The cases share the caches of a rank, e.g. for the shapes of its operators.
    """

    world: int
    function: Callable[..., Any]
    cases: dict[str, tuple[Any, ...]]
    """Arguments of the function by name of the case."""
    timeout: float = 300

    def of(self, name: str) -> list[Any]:
        """Result of the function on each rank; a failed case, and all cases after it, raise the error of that case."""
        failures = [error for _, error in self._by_rank if error]
        if any(name not in found for found, _ in self._by_rank):
            raise AssertionError("\n".join(failures))
        return [found[name] for found, _ in self._by_rank]

    @cached_property
    def _by_rank(self) -> list[tuple[dict[str, Any], str]]:
        return on_ranks(self.world, self._run, timeout=self.timeout)

    def _run(self) -> tuple[dict[str, Any], str]:
        found: dict[str, Any] = {}
        for name, arguments in self.cases.items():
            try:
                found[name] = self.function(*arguments)
            except Exception:
                return found, f"--- rank {os.environ['RANK']}, {name}\n{traceback.format_exc()}"
        return found, ""


def _start(
    rank: int, world: int, local: int, port: int, folder: Path, function: Callable[..., Any], arguments: Any
) -> int:
    parent = os.getpid()
    if (process := os.fork()) != 0:
        return process
    code = 1
    try:
        # A collection would visit, and so copy, all memory that this process shares with its parent.
        gc.freeze()
        end_with_parent(parent)
        os.environ |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % local),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(local),
            "NODE_RANK": str(rank // local),
            "GROUP_RANK": str(rank // local),
            "TORCHELASTIC_RUN_ID": "tests",
        }
        (folder / str(rank)).write_bytes(pickle.dumps(function(*arguments)))
        code = 0
    except BaseException:
        Path(folder / f"{rank}.error").write_text(traceback.format_exc())
    finally:
        os._exit(code)


def _wait(processes: list[int], deadline: float) -> list[int]:
    codes: dict[int, int] = {}
    while len(codes) < len(processes):
        for process in processes:
            if process not in codes:
                done, status = os.waitpid(process, os.WNOHANG)
                if done:
                    codes[process] = os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline or any(codes.values()):
            time.sleep(1)  # let the other ranks report their errors
            for process in set(processes) - set(codes):
                os.kill(process, signal.SIGKILL)
            for process in set(processes) - set(codes):
                codes[process] = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        time.sleep(0.02)
    return [codes[process] for process in processes]


def _error(path: Path) -> str:
    report = path.with_name(f"{path.name}.error")
    return report.read_text() if report.exists() else "(killed)"
