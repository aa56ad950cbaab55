"""``python -m lit_ft`` in a fork of the test process, which saves the seconds that its imports take.

A fork has its own arguments, environment, working directory, session, output and exit handlers, and runs the module as
``-m`` does. If a command starts further ``python -m lit_ft`` processes, as Lightning's launcher does, they are forks
too.
"""

import atexit
import contextvars
import ctypes
import gc
import logging
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, NoReturn

import preloading  # noqa: F401  # before the fork
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from ranks import end_with_parent, renew_thread_pool
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

COLD_POPEN = subprocess.Popen
_CLONE_NEWNET = 0x40000000


class ForkedCommand:
    """``python -m MODULE ARGUMENTS`` in a fork, with the part of ``subprocess.Popen`` that tests and launchers use."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        stdout: IO[bytes] | None = None,
        stderr: IO[bytes] | None = None,
        start_new_session: bool = False,
        network: str | None = None,
        dies_with_parent: bool = True,
        module: str = "lit_ft",
    ) -> None:
        """Start the command.

        Args:
            arguments: arguments after ``python -m MODULE``.
            env: all environment variables; None inherits them.
            cwd: working directory; None inherits it.
            stdout: file for stdout; None inherits stdout.
            stderr: file for stderr; None inherits stderr.
            start_new_session: whether the command leads a session of its own.
            network: name of the network namespace (``ip netns``) to enter.
            dies_with_parent: whether the command is killed when this process ends.
            module: module to run.
        """
        self.args = [sys.executable, "-m", module, *arguments]
        self.returncode: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                if dies_with_parent:
                    end_with_parent(parent)
                if start_new_session:
                    os.setsid()
                if network is not None:
                    _enter_network(network)
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                for number, file in ((1, stdout), (2, stderr)):
                    if file is not None:
                        os.dup2(file.fileno(), number)
                os.chdir(cwd or ".")
                if env is not None:
                    os.environ.clear()
                    os.environ.update(env)
                contextvars.Context().run(_run, module, list(arguments))
            except BaseException:
                os.write(2, traceback.format_exc().encode())
            finally:
                os._exit(1)
        deadline = time.monotonic() + 10
        # Who looks for the session right after the start must find it, however busy the machine is.
        while start_new_session and os.getsid(self.pid) != self.pid and time.monotonic() < deadline:
            time.sleep(0.001)

    def poll(self) -> int | None:
        """Exit code, or minus the number of the signal that ended the command; None while it runs."""
        if self.returncode is None:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            if done:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the command, at most ``timeout`` seconds; returns the exit code."""
        deadline = time.monotonic() + (timeout if timeout is not None else float("inf"))
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            time.sleep(0.02)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def session_members(session: int) -> list[int]:
    """Process ids of a session, without zombies."""
    found = []
    for process in filter(str.isdecimal, os.listdir("/proc")):
        try:
            stat = Path("/proc", process, "stat").read_text()
        except OSError:  # it has ended
            continue
        state, _, _, its_session = stat.rpartition(")")[2].split()[:4]
        if int(its_session) == session and state != "Z":
            found.append(int(process))
    return found


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def run_forked(
    *arguments: str,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    timeout: float = 180,
    module: str = "lit_ft",
) -> "subprocess.CompletedProcess[str]":
    """``subprocess.run(["python", "-m", module, *arguments], capture_output=True, text=True)`` in a fork."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        command = ForkedCommand(arguments, env=env, cwd=cwd, stdout=out, stderr=errors, module=module)
        try:
            code = command.wait(timeout)
        finally:
            command.kill()
            command.wait()
        texts = []
        for file in (out, errors):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    return subprocess.CompletedProcess(command.args, code, *texts)


def _start_forked_module(
    command: Sequence[str], *, stdout: IO[Any], stderr: IO[Any], env: Mapping[str, str]
) -> "ForkedCommand | subprocess.Popen[bytes]":
    if [*command[:2]] != [sys.executable, "-m"]:
        return COLD_POPEN(command, stdout=stdout, stderr=stderr, env=env)
    return ForkedCommand(command[3:], env=env, stdout=stdout, stderr=stderr, module=command[2])


forked_subprocess = SimpleNamespace(Popen=_start_forked_module, TimeoutExpired=subprocess.TimeoutExpired)
"""In place of the module ``subprocess``: its ``Popen`` forks for a ``python -m MODULE`` with this Python."""


def _run(module: str, arguments: list[str]) -> NoReturn:
    """Run the module in this fork as ``python -m`` does in a new process, and end the fork."""
    gc.freeze()
    renew_thread_pool()
    if not torch.cuda.is_available():  # torch's build for CUDA bars forks of a process that has looked for devices
        torch.cuda._is_in_bad_fork = lambda: False
    atexit._clear()  # remove the handlers of the test process; there is no public way
    for number in (signal.SIGTERM, signal.SIGALRM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _write_to_descriptors()
    # Lightning reads the rank when it is imported.
    rank_zero_only.rank = next(  # type: ignore[attr-defined]
        (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID") if name in os.environ), 0
    )
    subprocess.Popen = subprocess_handler.Popen = _Popen  # type: ignore[misc]
    sys.argv = [module, *arguments]
    code: Any = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as stop:
        code = stop.code
    except BaseException:
        code = 1
        traceback.print_exc()
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join()
    atexit._run_exitfuncs()  # the handlers of the command
    if isinstance(code, str):
        print(code, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def _write_to_descriptors() -> None:
    """Send output, warnings and logs to descriptors 1 and 2, not to pytest's capture."""
    # These outlive the objects: those of a fork's fork would else close what they are replaced with.
    sys.stdin, sys.stdout, sys.stderr = (
        open(number, mode, buffering=1, closefd=False)  # noqa: SIM115
        for number, mode in enumerate("rww")
    )
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]
    warnings.showwarning = lambda *told, **options: sys.stderr.write(warnings.formatwarning(*told[:4]))
    logging.root.handlers.clear()
    for logger in logging.root.manager.loggerDict.values():
        for handler in getattr(logger, "handlers", []):
            if type(handler) is logging.StreamHandler:
                handler.stream = sys.stderr  # setStream would flush the previous stream, which may be closed


def _enter_network(name: str) -> None:
    with open(f"/var/run/netns/{name}") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"network namespace {name} cannot be entered")


class _Popen(COLD_POPEN):  # type: ignore[misc, type-arg]
    """``subprocess.Popen`` that forks if the command is ``python -m lit_ft``."""

    def __new__(cls, args: Any, **options: Any) -> Any:
        python, *words = args
        if words[:1] == ["-u"]:  # of torchrun
            del words[0]
        if python == sys.executable and words[:1] == ["-m"] and words[1] in ("lit_ft", "lit_ft.__main__"):
            return ForkedCommand(words[2:], dies_with_parent=False, **options)
        return super().__new__(cls)
