"""Execution of a function in several forked processes that can form a process group."""

import contextlib
import ctypes
import gc
import os
import pickle
import random
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import cache, partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import seed_everything
from torch import distributed as dist
from torch.distributed import distributed_c10d

_PR_SET_PDEATHSIG = 1


def free_port() -> int:
    """A port below those that the system assigns to others, e.g. to another worker of ``pytest -n``."""
    while True:
        port = random.SystemRandom().randrange(16_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def renew_thread_pool() -> None:
    """Make torch's pool of threads anew in a fork; threads that each did so at once would find none."""
    torch.set_num_threads(torch.get_num_threads())


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


@cache
def _device() -> Any:
    return dist.ProcessGroupGloo.create_default_device()


class OneThread(dist.ProcessGroupGloo):
    """Groups of a process that share one thread, which wakes up 100 times a second; by default each has its own."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta, **_: bool) -> None:
        options = dist.ProcessGroupGloo._Options()
        options._devices, options._timeout = [_device()], timeout
        super().__init__(store, rank, size, options)


class SegmentationFault(AssertionError):
    """A rank that ended by SIGSEGV."""


class LiveRanks:
    """Processes that stay alive between the functions that they run, for each number of processes.

    Their start, their process group and first calls of operators, on plain tensors and on those of a mesh, are paid
    once. They start when they are first needed, and anew after a failure or a timeout.
    """

    def __init__(self) -> None:
        self._groups: dict[int, list[tuple[int, Connection]]] = {}

    def __call__(self, world: int, function: Callable[..., Any], *arguments: Any, timeout: float = 150) -> list[Any]:
        """Run ``function(*arguments)``, which can be pickled, in ``world`` processes; returns the result of each.

        Once more in new processes, with a warning, where one ends by SIGSEGV: a thread of gloo rarely does so
        (torch 2.13, docs/log.md).
        """
        try:
            return self._run(world, function, *arguments, timeout=timeout)
        except SegmentationFault as error:
            warnings.warn(f"a rank has crashed, its function is run again: {error}", stacklevel=2)
            return self._run(world, function, *arguments, timeout=timeout)

    def _run(self, world: int, function: Callable[..., Any], *arguments: Any, timeout: float) -> list[Any]:
        if world not in self._groups:
            self._groups[world] = self._start(world)
        pipes = [pipe for _, pipe in self._groups[world]]
        task = pickle.dumps((function, arguments))
        for pipe in pipes:
            pipe.send_bytes(task)
        answers, deadline = dict[Connection, tuple[str, Any]](), time.monotonic() + timeout
        while waiting := [pipe for pipe in pipes if pipe not in answers]:
            if not (ready := wait(waiting, max(0, deadline - time.monotonic()))):
                break
            for pipe in ready:
                try:
                    answers[pipe] = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    answers[pipe] = "(killed)", None
                if answers[pipe][0]:
                    deadline = min(deadline, time.monotonic() + 1)  # let the other ranks report their errors
        errors = [answers.get(pipe, ("(no answer in time)", None))[0] for pipe in pipes]
        if any(errors):
            codes = self._end(world)
            pairs = zip(errors, codes, strict=True)
            errors = [f"{error}, exit {code}" if error == "(killed)" else error for error, code in pairs]
            message = "\n".join(f"--- rank {rank}\n{error}" for rank, error in enumerate(errors) if error)
            raise (SegmentationFault if -signal.SIGSEGV in codes else AssertionError)(message)
        return [answers[pipe][1] for pipe in pipes]

    def end(self) -> None:
        for world in list(self._groups):
            self._end(world)

    def _start(self, world: int) -> list[tuple[int, Connection]]:
        group, port = [], free_port()
        for rank in range(world):
            ours, theirs = Pipe()
            group.append((_fork(rank, world, world, port, partial(_serve, theirs)), ours))
            theirs.close()  # a rank that ends shows as the end of its pipe
        return group

    def _end(self, world: int) -> list[int]:
        """End the processes; returns their exit codes, minus the number of the signal that ended each."""
        codes = []
        for process, pipe in self._groups.pop(world):
            os.kill(process, signal.SIGKILL)
            codes.append(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
            pipe.close()
        return codes


def _serve(pipe: Connection) -> None:
    """Run the functions that come through the pipe, each with the same seed and environment."""
    environment = dict(os.environ)
    while True:
        function, arguments = pickle.loads(pipe.recv_bytes())
        seed_everything(7, verbose=False)
        try:
            answer = pickle.dumps(("", function(*arguments)))
            gc.freeze()  # DeepSpeed lets each collection of the next function visit everything else
        except BaseException:
            answer = pickle.dumps((_traceback(), None))
        os.environ.clear()
        os.environ.update(environment)
        pipe.send_bytes(answer)


def _start(
    rank: int, world: int, local: int, port: int, folder: Path, function: Callable[..., Any], arguments: Any
) -> int:
    def run() -> None:
        try:
            (folder / str(rank)).write_bytes(pickle.dumps(function(*arguments)))
        except BaseException:
            Path(folder / f"{rank}.error").write_text(_traceback())
            raise

    return _fork(rank, world, local, port, run)


def _fork(rank: int, world: int, local: int, port: int, run: Callable[[], None]) -> int:
    """Process id of a fork that runs ``run`` as a rank."""
    parent = os.getpid()
    if (process := os.fork()) != 0:
        return process
    code = 1
    try:
        # A collection would visit, and so copy, all memory that this process shares with its parent.
        gc.freeze()
        end_with_parent(parent)
        renew_thread_pool()
        distributed_c10d.ProcessGroupGloo = OneThread  # type: ignore[misc]
        # DTensor looks up the lines of the whole call stack for each operator and shape that it meets first.
        sys.tracebacklimit = 1
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
        run()
        code = 0
    finally:
        os._exit(code)


def _traceback() -> str:
    """Whole traceback of the exception that is handled."""
    limit, sys.tracebacklimit = sys.tracebacklimit, 1000
    try:
        return traceback.format_exc()
    finally:
        sys.tracebacklimit = limit


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
