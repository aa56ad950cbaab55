"""Options of a test run, and how its processes run.

shared_fixtures.py has the rest; the process that hands tests to the workers of ``pytest -n`` does without its imports.
"""

import ctypes
import gc
import os
import platform
import shutil
import struct
import sys
import tempfile

import pytest

_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
"""Number of the system call, by machine: ``os`` does not have it, and glibc from 2.41 on only."""


def _take_long_turns() -> None:
    """Let processes take turns of 20 ms, and none interrupt another when it wakes up; those that it starts do so, too.

    With turns of 1.4 ms, as Linux may have them, more processes than cores spend a tenth of their time on refilling
    caches; Linux before 6.12 keeps its own turns. A thread of gloo that interrupts another waits, busily, for its lock.
    """
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    if (number := _SCHED_SETATTR.get(platform.machine())) is not None:
        # size, policy, flags, nice, priority; then the turn in ns, deadline and period (man 2 sched_setattr)
        attributes = struct.pack("=IIQiIQQQ", 48, os.SCHED_BATCH, 0, 0, 0, 20_000_000, 0, 0)
        ctypes.CDLL(None).syscall(number, 0, attributes, 0)


if sys.platform == "linux":
    _take_long_turns()
gc.disable()  # until all tests are collected: collections among what is imported, which stays, take a fifth of it
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["LIT_FT_CACHE"] = tempfile.mkdtemp(prefix="lit_ft-tests-")  # started processes inherit it


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rows", type=int, default=250, help="mutated rows of each format, and a tenth as damaged files")
    parser.addoption("--numerics", help="write the table of largest differences to this file")
    parser.addoption("--matrix", help="compare all architectures under all layouts, and write the table to this file")


def pytest_configure(config: pytest.Config) -> None:
    tables = [name for name in ("--numerics", "--matrix") if config.getoption(name)]
    if tables and config.getoption("numprocesses", None):
        raise pytest.UsageError(f"{tables[0]} writes what the tests of one process find; leave out -n")
    hands_out_tests = config.getoption("numprocesses", None) and not hasattr(config, "workerinput")
    if not hands_out_tests:
        config.pluginmanager.import_plugin("shared_fixtures")


def pytest_unconfigure() -> None:
    shutil.rmtree(os.environ["LIT_FT_CACHE"], ignore_errors=True)
