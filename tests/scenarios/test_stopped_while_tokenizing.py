"""A command that is stopped while it tokenizes leaves neither processes nor unfinished files."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import ENVIRONMENT, recipe
from conftest import make_rows
from forked_commands import ForkedCommand

pytestmark = pytest.mark.processes


def session_members(session: int) -> list[int]:
    """Process ids of a session, without zombies."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, its_session = path.read_text().rpartition(")")[2].split()[:4]
        except OSError:  # it has ended
            continue
        if int(its_session) == session and state != "Z":
            found.append(int(path.parent.name))
    return found


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize(
    "signals",
    [
        (signal.SIGTERM,),
        (signal.SIGTERM, signal.SIGTERM),  # as `timeout` of GNU and many schedulers send it
        (signal.SIGINT, signal.SIGTERM),
    ],
)
def test_nothing_is_left(tmp_path: Path, model_folder: str, write_rows: Any, signals: tuple[int, ...]) -> None:
    cache = tmp_path / "cache"
    arguments = recipe(tmp_path, model_folder, write_rows(make_rows(300) * 100), max_steps=1)
    options = ["--data.tokenize_workers", "2", "--run_dir", str(tmp_path / "run")]
    command = ForkedCommand(
        [*arguments, *options], env={**ENVIRONMENT, "LIT_FT_CACHE": str(cache)}, cwd=tmp_path, start_new_session=True
    )
    wait_until(lambda: any(cache.glob("tokens/*.unfinished")) and len(session_members(command.pid)) == 3)
    for number in signals:
        os.killpg(command.pid, number) if number == signal.SIGINT else command.send_signal(number)
    assert command.wait(20) == 128 + signals[0]
    wait_until(lambda: not session_members(command.pid), 3)
    assert [path.suffix for path in (cache / "tokens").iterdir()] == [".lock"]
