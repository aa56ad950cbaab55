"""Workers of the training data leave signals to the process that trains, and end with it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from command_line import ENVIRONMENT, recipe
from forked_commands import ForkedCommand, session_members, wait_until

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    ("signals", "are_to_all", "is_training"),
    [
        ((signal.SIGTERM,), True, True),  # as `timeout` and schedulers send it
        ((signal.SIGTERM,), False, True),
        ((signal.SIGINT, signal.SIGINT), True, True),  # as a terminal sends Ctrl-C
        ((signal.SIGTERM,), True, False),
        ((signal.SIGTERM,), False, False),
    ],
)
def test_a_stopped_run_leaves_no_workers(
    tmp_path: Path,
    model_folder: str,
    write_rows: Any,
    signals: tuple[int, ...],
    are_to_all: bool,
    is_training: bool,
) -> None:
    run, log = tmp_path / "run", tmp_path / "log.txt"
    arguments = recipe(tmp_path, model_folder, write_rows(), max_steps=2_000)
    options = ["--data.num_workers", "2", "--data.tokenize_workers", "0", "--run_dir", str(run)]
    with log.open("wb") as file:
        command = ForkedCommand(
            [*arguments, *options], env=ENVIRONMENT, cwd=tmp_path, stdout=file, stderr=file, start_new_session=True
        )
    wait_until(lambda: len(session_members(command.pid)) >= 2)  # the first worker is starting
    if is_training:
        wait_until(lambda: "of 2,000" in log.read_text())  # a line of progress
    for number in signals:
        os.killpg(command.pid, number) if are_to_all else command.send_signal(number)
    assert command.wait(30) == 128 + signals[0]
    wait_until(lambda: not session_members(command.pid), 3)
    text = log.read_text()
    assert "Traceback" not in text
    last = run / "checkpoints" / "last.ckpt"
    assert last.is_file() or not is_training  # a signal to a worker that starts may come after the first step
    saved = f"saved {last}; resume with: " if last.is_file() else "before the first step there is nothing to save"
    assert saved in text


def test_workers_end_with_a_killed_run(tmp_path: Path, model_folder: str, write_rows: Any) -> None:
    arguments = recipe(tmp_path, model_folder, write_rows(), max_steps=2_000)
    options = ["--data.num_workers", "2", "--run_dir", str(tmp_path / "run")]
    command = ForkedCommand([*arguments, *options], env=ENVIRONMENT, cwd=tmp_path, start_new_session=True)
    wait_until(lambda: len(session_members(command.pid)) == 3)
    time.sleep(0.2)
    command.kill()
    command.wait(5)
    wait_until(lambda: not session_members(command.pid), 3)


def test_a_worker_that_starts_when_its_run_is_dead_ends(tmp_path: Path) -> None:
    """As one that was forked right before a kill."""
    script = tmp_path / "worker.py"
    script.write_text(
        "import os, subprocess, sys, time\n"
        "from ctypes import c_byte\n"
        "from lit_ft.data.worker_processes import leave_signals_to_parent\n"
        "ended = subprocess.Popen([sys.executable, '-c', ''])\n"
        "ended.wait()\n"
        "leave_signals_to_parent(c_byte(0), ended.pid)\n"
        "time.sleep(20)\n"
        "sys.exit(3)\n"
    )
    assert subprocess.run([sys.executable, str(script)], timeout=60, env=ENVIRONMENT, check=False).returncode == 0
