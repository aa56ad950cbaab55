"""Names and locks of run folders: no two runs write to one, and no clock mixes them up."""

import errno
import fcntl
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from command_line import here, recipe
from ranks import free_port, on_ranks

from lit_ft import RecipeError
from lit_ft.run import folder as run_folder
from lit_ft.run import lock as run_lock
from lit_ft.run.folder import RUNS, RunFolder, new_run, newest_run
from lit_ft.run.launching import from_rank_zero


class Clock(datetime):
    """A clock that stands still."""

    time = "2026-03-01 12:00:00"

    @classmethod
    def now(cls, tz: Any = None) -> datetime:
        return datetime.fromisoformat(cls.time)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_folder, "datetime", Clock)
    monkeypatch.setattr(Clock, "time", Clock.time)
    return Clock


# --- names ---------------------------------------------------------------------------------------


def with_checkpoint(run: RunFolder) -> str:
    run.checkpoints.mkdir()
    (run.checkpoints / "last.ckpt").touch()
    return run.root.name


def test_runs_of_the_same_second_have_names_of_their_own(clock: Any) -> None:
    names = [new_run("a", create=True).root.name for _ in range(11)]
    assert names == ["2026-03-01_12-00-00", *(f"2026-03-01_12-00-00-{n}" for n in range(2, 12))]
    assert new_run("b", create=True).root.name == names[0]


def test_a_run_that_wrote_nothing_leaves_no_folder(
    tmp_path: Path, model_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for resume in ([], ["--resume", "auto"]):
        here(
            monkeypatch,
            "fit",
            "--model.pretrained",
            model_folder,
            "--data.path",
            "gone.json",
            "--trainer.accelerator",
            "cpu",
            *resume,
            code=2,
        )
    (tmp_path / "mine").mkdir()
    here(
        monkeypatch, "fit", "--model.pretrained", model_folder, "--data.path", "gone.json", "--run_dir", "mine", code=2
    )
    assert (tmp_path / "mine").is_dir()  # only what was made for the run
    assert list((tmp_path / RUNS).glob("*/*")) == []


def test_a_clock_set_back_neither_overwrites_nor_hides_a_run(clock: Any) -> None:
    with_checkpoint(new_run("a", create=True))
    clock.time = "2025-12-31 23:00:00"
    second = with_checkpoint(new_run("a", create=True))
    assert second == "2026-03-01_12-00-00-2"
    assert newest_run("a").root.name == second
    # A copy or a touched file of an older run makes it no newer.
    os.utime("checkpoints/runs/a/2026-03-01_12-00-00/checkpoints/last.ckpt", (2e9, 2e9))
    assert newest_run("a").root.name == second
    clock.time = "2026-03-02 08:00:00"
    assert with_checkpoint(new_run("a", create=True)) == "2026-03-02_08-00-00"
    assert newest_run("a").root.name == "2026-03-02_08-00-00"


def test_the_newest_of_ten_runs_of_a_second(clock: Any) -> None:
    names = [with_checkpoint(new_run("a", create=True)) for _ in range(10)]
    assert newest_run("a").root.name == names[-1] == "2026-03-01_12-00-00-10"


def test_a_run_or_its_checkpoints_are_no_checkpoint(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "mine")
    run.checkpoints.mkdir(parents=True)
    checkpoint = run.checkpoints / "epoch=0-step=2.ckpt"
    checkpoint.touch()
    assert run.chosen_checkpoint(str(checkpoint)) == checkpoint
    with pytest.raises(RecipeError, match=f"is a run's folder; write --run_dir {run.root} --ckpt_path last, or name a"):
        run.chosen_checkpoint(str(run.root))
    with pytest.raises(RecipeError, match="is a folder of checkpoints; name one of them, or `last` or `best`"):
        run.chosen_checkpoint(str(run.checkpoints))


def test_a_folder_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "RUNS", Path("/proc/runs"))
    with pytest.raises(RecipeError, match=r"run_dir='/proc/runs/a/.*' cannot be written .*--run_dir DIR"):
        new_run("a", create=True)
    with pytest.raises(RecipeError, match="cannot be written"):
        RunFolder(Path("/proc/run")).claim(resuming=False)


# --- locks ---------------------------------------------------------------------------------------


@contextmanager
def other_process(does: Callable[[], Any]) -> Iterator[int]:
    """A process that has done something, and lives."""
    reader, writer = os.pipe()
    if (process := os.fork()) == 0:
        try:
            does()
            os.write(writer, b"done")
            time.sleep(60)
        finally:
            os._exit(1)
    os.close(writer)
    assert os.read(reader, 4) == b"done"
    yield process
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)


@pytest.mark.processes
@pytest.mark.parametrize("resuming", [False, True])
def test_a_second_process_is_refused_while_the_first_lives(tmp_path: Path, resuming: bool) -> None:
    folder = RunFolder(tmp_path / "run")
    with other_process(lambda: folder.claim(resuming=False)) as process:
        refused = rf"in use by process {process} on .+, which started at 20.*stop it"
        with pytest.raises(RecipeError, match=refused):
            folder.claim(resuming=resuming)
        with pytest.raises(RecipeError, match="no checkpoint in .* yet: the run goes on"):
            folder.last_checkpoint()
    for name in ("last", "best"):
        with pytest.raises(RecipeError, match="the run ended before its first one"):
            folder.chosen_checkpoint(name)
    folder.claim(resuming=resuming)  # the kernel has freed it
    folder.claim(resuming=resuming)  # and this process has it
    run_lock.release_runs()
    with other_process(lambda: folder.claim(resuming=True)):
        pass


@pytest.mark.processes
def test_workers_of_a_killed_run_do_not_hold_its_folder(tmp_path: Path) -> None:
    folder, child = RunFolder(tmp_path / "run"), tmp_path / "child"

    def claim() -> None:
        folder.claim(resuming=False)
        if (process := os.fork()) == 0:
            time.sleep(60)
            os._exit(0)
        child.write_text(str(process))

    with other_process(claim):
        pass
    os.kill(int(child.read_text()), 0)  # it lives
    folder.claim(resuming=True)
    run_lock.release_runs()
    os.kill(int(child.read_text()), signal.SIGKILL)


def test_a_file_system_without_locks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any, caplog: Any
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", refuse)
    RunFolder(tmp_path / "run").claim(resuming=False)
    said = capfd.readouterr().err + caplog.text
    assert "without locks (No locks available): a second run in it would not be noticed" in said


@pytest.mark.processes
def test_a_second_fit_or_resume_of_a_running_run_is_refused_and_validate_reads_it(
    tmp_path: Path, model_folder: str, write_rows: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    arguments = recipe(tmp_path, model_folder, write_rows(count=8), max_steps=1)
    run = ["--run_dir", str(tmp_path / "run")]
    here(monkeypatch, *arguments, *run)
    with other_process(lambda: RunFolder(tmp_path / "run").claim(resuming=True)) as process:
        before = {file: file.stat().st_mtime_ns for file in (tmp_path / "run").rglob("*")}
        for more in ([], ["--ckpt_path", "last"], ["--resume", "auto"]):
            here(monkeypatch, *arguments, *run, *more, code=2)
            assert f"is in use by process {process}" in capsys.readouterr().err
        val = ["--data.val_path", write_rows(count=4, name="val.json"), "--ckpt_path", "last"]
        here(monkeypatch, "validate", *arguments[1:], *run, *val)
        assert {file: file.stat().st_mtime_ns for file in (tmp_path / "run").rglob("*")} == before


# --- one name for all ranks ----------------------------------------------------------------------


def _name(hour: int | None, num_nodes: int) -> tuple[str, bool]:
    rank = int(os.environ["RANK"])
    asked = []

    def choose() -> str:
        asked.append(rank)
        return f"{rank} at {hour}"

    environment = dict(os.environ)
    if num_nodes > 1:  # a user starts one process a node
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RUN_ID", "LOCAL_WORLD_SIZE"):
            environment.pop(name)
        environment["NODE_RANK"] = str(rank)
    os.environ.clear()
    os.environ.update(environment)
    names = {from_rank_zero(choose, num_nodes, timedelta(seconds=30)) for _ in range(2)}
    assert len(names) == 1
    return names.pop(), bool(asked)


@pytest.mark.processes
@pytest.mark.parametrize("num_nodes", [1, 3], ids=["torchrun", "nodes"])
def test_all_ranks_take_the_name_that_rank_0_has_chosen(num_nodes: int) -> None:
    found = on_ranks(3, _name, 7, num_nodes, timeout=60)
    assert found == [("0 at 7", True), ("0 at 7", False), ("0 at 7", False)]


def _name_after_a_restart() -> str:
    # Each node counts its own restarts; with a store of torchrun's all ranks would share the count.
    os.environ["TORCHELASTIC_RESTART_COUNT"] = os.environ["RANK"]
    return from_rank_zero(lambda: "run", 1, timedelta(seconds=10))


@pytest.mark.processes
def test_nodes_that_have_counted_other_restarts_meet() -> None:
    assert on_ranks(2, _name_after_a_restart, timeout=60) == ["run", "run"]


def test_a_rank_that_never_comes_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "NODE_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match="1/3 clients joined"):
        from_rank_zero(lambda: "run", 3, timedelta(seconds=0.3))


def _fit(folder: Path, arguments: list[str]) -> None:
    os.chdir(folder)
    Clock.time = f"2026-03-01 12:00:0{os.environ['RANK']}"
    run_folder.datetime = Clock  # type: ignore[misc]
    with pytest.MonkeyPatch.context() as monkeypatch:
        here(monkeypatch, *arguments)


@pytest.mark.processes
def test_ranks_with_different_clocks_write_to_one_folder(tmp_path: Path, model_folder: str, write_rows: Any) -> None:
    arguments = recipe(tmp_path, model_folder, write_rows(count=8), max_steps=2, devices=2, strategy="ddp")
    on_ranks(2, _fit, tmp_path, arguments, timeout=120)
    assert [run.name for run in (tmp_path / "checkpoints/runs/recipe").iterdir()] == ["2026-03-01_12-00-00"]
