"""Ranks of a process group, forked from the test process, so that they need no imports."""

import ctypes
import gc
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1


class Ranks:
    """Forked processes that run a function as ranks of a group, with one output file each."""

    def __init__(self, folder: Path, count: int, function: Callable[[], Any]) -> None:
        self.folder, self.count = folder, count
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.codes: dict[int, int | None] = {}
        self.processes = [self._start(rank, port, function) for rank in range(count)]

    def _start(self, rank: int, port: int, function: Callable[[], Any]) -> int:
        parent = os.getpid()
        if (process := os.fork()) != 0:
            return process
        code: Any = 1
        try:
            gc.freeze()  # a collection would copy the memory that this process shares with its parent
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # no rank outlives a killed test
            if os.getppid() != parent:
                os._exit(1)
            with (self.folder / f"rank-{rank}").open("w", buffering=1) as out:
                sys.stdout = sys.stderr = out
                os.environ |= {
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "WORLD_SIZE": str(self.count),
                    "RANK": str(rank),
                }
                os.environ |= {"LOCAL_RANK": str(rank), "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "tests"}
                try:
                    function()
                    code = 0
                except BaseException as error:
                    code = error.code if isinstance(error, SystemExit) else 1
                    print(f"{type(error).__name__}: {error}", flush=True)
        finally:
            os._exit(code)

    def wait(self, ranks: list[int], seconds: float) -> float:
        """Wait until these ranks have ended; returns the seconds."""
        start = time.monotonic()
        while missing := [rank for rank in ranks if rank not in self.codes]:
            assert time.monotonic() - start < seconds, f"ranks {missing} go on\n{self.output()}"
            for rank in missing:
                done, status = os.waitpid(self.processes[rank], os.WNOHANG)
                if done:
                    self.codes[rank] = os.waitstatus_to_exitcode(status)
            time.sleep(0.02)
        return time.monotonic() - start

    def output(self) -> str:
        return "\n".join(f"--- {file.name}\n{file.read_text()}" for file in sorted(self.folder.glob("rank-*")))

    def said_by(self, rank: int) -> str:
        return (self.folder / f"rank-{rank}").read_text()

    def kill(self) -> None:
        for rank, process in enumerate(self.processes):
            if rank not in self.codes:
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
