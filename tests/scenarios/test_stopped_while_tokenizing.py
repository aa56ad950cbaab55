"""A command that is stopped while it tokenizes leaves neither processes nor unfinished files."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from command_line import ENVIRONMENT, recipe
from forked_commands import ForkedCommand, session_members, wait_until
from shared_fixtures import make_rows

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    ("signals", "are_to_all"),
    [
        ((signal.SIGTERM,), False),
        ((signal.SIGTERM, signal.SIGTERM), False),  # as many schedulers send it
        ((signal.SIGTERM, signal.SIGTERM), True),  # as `timeout` of GNU sends it: to its child, and to the group
        ((signal.SIGINT, signal.SIGTERM), True),
    ],
)
def test_nothing_is_left(
    tmp_path: Path, model_folder: str, write_rows: Any, signals: tuple[int, ...], are_to_all: bool
) -> None:
    cache = tmp_path / "cache"
    arguments = recipe(tmp_path, model_folder, write_rows(make_rows(300) * 100), max_steps=1)
    options = ["--data.tokenize_workers", "2", "--run_dir", str(tmp_path / "run")]
    command = ForkedCommand(
        [*arguments, *options], env={**ENVIRONMENT, "LIT_FT_CACHE": str(cache)}, cwd=tmp_path, start_new_session=True
    )
    wait_until(lambda: any(cache.glob("tokens/*.unfinished")) and len(session_members(command.pid)) == 3)
    for number in signals:
        os.killpg(command.pid, number) if are_to_all else command.send_signal(number)
    assert command.wait(20) == 128 + signals[0]
    wait_until(lambda: not session_members(command.pid), 3)
    assert [path.suffix for path in (cache / "tokens").iterdir()] == [".lock"]


def test_a_killed_worker_ends_the_others(tmp_path: Path, model_folder: str, write_rows: Any) -> None:
    cache = tmp_path / "cache"
    arguments = recipe(tmp_path, model_folder, write_rows(make_rows(300) * 100), max_steps=1)
    options = ["--data.tokenize_workers", "2", "--run_dir", str(tmp_path / "run")]
    command = ForkedCommand(
        [*arguments, *options], env={**ENVIRONMENT, "LIT_FT_CACHE": str(cache)}, cwd=tmp_path, start_new_session=True
    )
    wait_until(lambda: any(cache.glob("tokens/*.unfinished")) and len(session_members(command.pid)) == 3)
    worker = max(set(session_members(command.pid)) - {command.pid})
    os.kill(worker, signal.SIGKILL)
    assert command.wait(20) == 1
    wait_until(lambda: not session_members(command.pid), 3)
    assert [path.suffix for path in (cache / "tokens").iterdir()] == [".lock"]
