"""Cores and threads: what a process may use, and what others leave free."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed

from lit_ft import process
from lit_ft.process import (
    THREAD_VARIABLES,
    available_cores,
    choose_threads,
    choose_threads_of_ranks,
    describe_threads,
    free_cores,
    resume_threads,
)


@pytest.mark.parametrize(
    ("available", "machine", "load", "cores"),
    [
        (2, 2, 0.0, 2),
        (2, 2, 0.4, 2),
        (2, 2, 1.2, 1),
        (2, 2, 7.0, 1),
        (4, 64, 60.0, 4),  # a container with four cores on a busy host that has four left
        (4, 64, 62.0, 2),
        (64, 64, 16.3, 48),
    ],
)
def test_free_cores(available: int, machine: int, load: float, cores: int) -> None:
    assert free_cores(available, machine, load) == cores


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4.0),
        ({}, None),
    ],
)
def test_the_quota_of_a_control_group(tmp_path: Path, files: dict[str, str], cores: float | None) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert process._quota(tmp_path) == cores


def test_available_cores_are_within_the_affinity() -> None:
    assert 1 <= available_cores() <= len(os.sched_getaffinity(0))


@pytest.fixture
def three_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    monkeypatch.setattr(process, "available_cores", lambda: 8)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(process, "_was_lowered", False)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("three_threads")
def test_threads_are_lowered_to_what_is_free_and_never_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in process.THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(process, "_load_of_others", lambda: 0.0)
    choose_threads()
    assert describe_threads() == "3 threads"
    monkeypatch.setattr(process, "_load_of_others", lambda: 7.2)
    choose_threads()
    assert describe_threads() == "1 thread, as other processes use the machine"


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize(
    ("load", "ranks", "threads", "said"),
    [
        (0.0, 2, 4, "4 threads"),
        (3.2, 2, 2, "2 threads, as other processes use the machine"),
        (7.2, 4, 1, "1 thread, as other processes use the machine"),
        (0.0, 16, 1, "1 thread"),
    ],
)
def test_ranks_share_the_cores_that_are_free(
    monkeypatch: pytest.MonkeyPatch, load: float, ranks: int, threads: int, said: str
) -> None:
    for name in THREAD_VARIABLES:
        monkeypatch.setenv(name, "9")  # so that what is set below is removed after the test
        monkeypatch.delenv(name)
    monkeypatch.setattr(process, "_load_of_others", lambda: load)
    choose_threads_of_ranks(ranks)
    assert describe_threads() == said
    assert os.environ["OMP_NUM_THREADS"] == str(threads)  # which the ranks inherit, and Lightning leaves
    _set_num_threads_if_needed(ranks)
    assert torch.get_num_threads() == threads


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize("name", process.THREAD_VARIABLES)
def test_a_number_of_the_user_stays(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for other in process.THREAD_VARIABLES:
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, "3")
    monkeypatch.setattr(process, "_load_of_others", lambda: 7.2)
    choose_threads()
    choose_threads_of_ranks(2)
    assert describe_threads() == "3 threads"


@pytest.mark.slow
def test_a_new_process_gets_free_cores_and_a_program_keeps_its_threads() -> None:
    program = """
import os, sys
from lit_ft.cli import main

os.cpu_count = lambda: 1  # so that one core is free at most
for number in (None, 3):
    if number:
        import torch

        torch.set_num_threads(number)
    try:
        main(["plan", "--help"])
    except SystemExit:
        print("threads", sys.modules["torch"].get_num_threads())
"""
    kept = {name: value for name, value in os.environ.items() if name not in process.THREAD_VARIABLES}
    done = subprocess.run([sys.executable, "-c", program], env=kept, capture_output=True, text=True, check=True)
    assert re.findall(r"^threads \d+", done.stdout, re.MULTILINE) == ["threads 1", "threads 3"]


@pytest.mark.usefixtures("three_threads")
def test_a_resumed_run_has_the_threads_of_the_stopped_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    resume_threads(2)
    assert torch.get_num_threads() == 2
    resume_threads(None)  # a checkpoint of a GPU, or of an earlier version
    assert torch.get_num_threads() == 2
    monkeypatch.setattr(process, "available_cores", lambda: 1)
    resume_threads(2)
    assert torch.get_num_threads() == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    resume_threads(2)
    assert torch.get_num_threads() == 1
