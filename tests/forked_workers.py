"""Workers of ``pytest -n`` as forks of the process that hands tests to them, which has imported what they need.

Each would import torch, transformers and the test modules by itself, and rewrite the modules' assertions: 23 seconds of
CPU time. Forks are made before execnet starts threads, and wait until they are asked for.
"""

import contextlib
import gc
import importlib
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
from execnet import gateway_io
from execnet.gateway_base import ExecModel, Popen2IO
from ranks import end_with_parent, renew_thread_pool


class ForkedIO(Popen2IO):
    """Both ends of a fork that runs what is written to it, as ``python -c`` of execnet does."""

    def __init__(self, execmodel: ExecModel, process: int, to_fork: Any, from_fork: Any) -> None:
        super().__init__(to_fork, from_fork, execmodel)
        self.process = process

    def wait(self) -> int:
        """Wait for the end of the fork; returns its exit code."""
        return os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process, signal.SIGKILL)


def fork_workers(config: pytest.Config, count: int) -> None:
    """Import what tests need, and let execnet take forks of this process for its first ``count`` gateways."""
    _import_tests(config)
    gc.freeze()
    waiting, start = [_fork() for _ in range(count)], gateway_io.create_io

    def create(spec: Any, execmodel: ExecModel) -> Any:
        return ForkedIO(execmodel, *waiting.pop(0)) if waiting else start(spec, execmodel)

    gateway_io.create_io = create


def _import_tests(config: pytest.Config) -> None:
    """Import fixtures and test modules; one that fails fails again, and is reported, where it is collected."""
    config.pluginmanager.rewrite_hook.mark_rewrite("shared_fixtures")  # as of a plugin
    names = [Path(argument.split("::")[0]) for argument in config.args]
    files = [file for name in names for file in (sorted(name.rglob("test_*.py")) if name.is_dir() else [name])]
    for folder in dict.fromkeys(str(file.resolve().parent) for file in files):
        sys.path.insert(0, folder)
    for module in ("shared_fixtures", *(file.stem for file in files)):
        with contextlib.suppress(Exception, pytest.skip.Exception):
            importlib.import_module(module)


def _fork() -> tuple[int, Any, Any]:
    """Process id of a fork, and the files that end in its stdin and begin at its stdout."""
    (stdin, to_fork), (from_fork, stdout) = os.pipe(), os.pipe()
    parent = os.getpid()
    if (process := os.fork()) == 0:
        try:
            end_with_parent(parent)
            renew_thread_pool()
            os.dup2(stdin, 0)
            os.dup2(stdout, 1)
            sys.stdin, sys.stdout = os.fdopen(0, "r", closefd=False), os.fdopen(1, "w", closefd=False)
            exec(eval(sys.stdin.readline()), {"__name__": "__main__"})
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(stdin)
    os.close(stdout)
    return process, os.fdopen(to_fork, "wb"), os.fdopen(from_fork, "rb")
