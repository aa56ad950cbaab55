"""Options of a test run, and how its processes run.

shared_fixtures.py has the rest; the process that hands tests to the workers of ``pytest -n`` does without its imports.
"""

import gc
import os
import shutil
import sys
import tempfile

import pytest

if sys.platform == "linux":
    # A thread that wakes up does not interrupt another: gloo's would wait, busily, for a lock of the one it interrupts.
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
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
