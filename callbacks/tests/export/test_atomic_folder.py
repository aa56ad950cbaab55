"""Folders of models: whole after a kill at any moment, and nothing of anybody else's is replaced."""

import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lit_callbacks.export.atomic_folder import keep_newest, put_back, write_atomically
from lit_callbacks.export.manifest import MANIFEST, verify_manifest
from safetensors.torch import save_file

pytestmark = pytest.mark.slow


def model(text: str) -> Callable[[Path], None]:
    """Writes a model of three files, one in a subfolder."""

    def write(folder: Path) -> None:
        (folder / "parts").mkdir(parents=True)
        for name in ("config.json", "model.safetensors", "parts/more.bin"):
            (folder / name).write_text(text)

    return write


def contents(folder: Path) -> set[str]:
    assert not verify_manifest(folder)
    return {path.read_text() for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST}


def killed_at(operation: int, write: Callable[[], None]) -> bool:
    """Whether a process that writes was killed, just before it opens, moves or removes a file for the n-th time."""
    if (process := os.fork()) == 0:
        left = operation

        def count(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal left
            if event in ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir"):
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        write()
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    assert code in (0, -signal.SIGKILL)
    return code != 0


@pytest.mark.parametrize("is_replacing", [False, True])
def test_a_kill_at_any_moment_leaves_a_whole_folder_or_none(tmp_path: Path, is_replacing: bool) -> None:
    operation, seen = 0, set()
    while True:
        operation += 1
        folder = tmp_path / str(operation) / "merged"
        folder.parent.mkdir()
        if is_replacing:
            write_atomically(folder, model("old"), None)
        was_killed = killed_at(operation, lambda folder=folder: write_atomically(folder, model("new"), None))
        if folder.exists():
            seen.add(*contents(folder))
            assert contents(folder) in ({"old"}, {"new"})
        put_back(folder)
        assert folder.exists() or not is_replacing
        write_atomically(folder, model("newest"), None)  # cleans up what the killed one left
        assert contents(folder) == {"newest"}
        assert [path.name for path in folder.parent.iterdir()] == ["merged"]
        if not was_killed:
            break
    assert operation > 10
    assert seen == ({"old", "new"} if is_replacing else {"new"})


THINGS = {
    "a thesis beside a model": {"config.json": "{}", "model.safetensors": "w", "thesis.tex": "life's work"},
    "a thesis in a folder": {"adapter_config.json": "{}", "chapters/1.tex": "life's work"},
    "a repository": {"config.json": "{}", ".git/HEAD": "ref"},
    "a thesis alone": {"thesis.tex": "life's work"},
}


@pytest.mark.parametrize("name", THINGS)
@pytest.mark.parametrize("has_manifest", [False, True])
def test_a_folder_with_anything_else_in_it_is_not_replaced(tmp_path: Path, name: str, has_manifest: bool) -> None:
    folder = tmp_path / "out"
    if has_manifest:
        write_atomically(folder, model("old"), None)
    for file, text in THINGS[name].items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=r"holds other things than a model \(.*name a new folder"):
        write_atomically(folder, model("new"), None)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_models_of_before_and_of_other_programs_are_replaced(tmp_path: Path) -> None:
    for name in ("config.json", "model-00001-of-00002.safetensors", "tokenizer.json", "README.md", "base.json"):
        (tmp_path / "out").mkdir(exist_ok=True)
        (tmp_path / "out" / name).touch()
    write_atomically(tmp_path / "out", model("new"), None)
    assert contents(tmp_path / "out") == {"new"}


def test_of_a_link_the_folder_is_replaced(tmp_path: Path) -> None:
    write_atomically(tmp_path / "disk" / "merged", model("old"), None)
    (tmp_path / "merged").symlink_to(tmp_path / "disk" / "merged")
    write_atomically(tmp_path / "merged", model("new"), None)
    assert (tmp_path / "merged").is_symlink()
    assert contents(tmp_path / "disk" / "merged") == {"new"}


def test_a_write_that_fails_keeps_the_old_model(tmp_path: Path) -> None:
    write_atomically(tmp_path / "out", model("old"), None)

    def fail(folder: Path) -> None:
        model("new")(folder)
        raise OSError("No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_atomically(tmp_path / "out", fail, None)
    assert contents(tmp_path / "out") == {"old"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_several_processes_may_write_a_model_at_once(tmp_path: Path) -> None:
    processes = []
    for number in range(3):
        if (process := os.fork()) == 0:
            code = 1
            try:
                for _ in range(30):
                    write_atomically(tmp_path / "out", model(str(number)), None)
                code = 0
            finally:
                os._exit(code)
        processes.append(process)
    assert [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes] == [0, 0, 0]
    assert not verify_manifest(tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_disk_that_is_full_is_an_error_of_the_system(tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        folder.mkdir()
        save_file({"weight": torch.zeros(5000)}, folder / "model.safetensors")

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))  # what the kernel does at a quota
    try:
        with pytest.raises(OSError, match=rf"File too large: '{tmp_path}/out'"):
            write_atomically(tmp_path / "out", write, None)
        with pytest.raises(OSError, match=rf"File too large: '{tmp_path}/out'"):
            write_atomically(tmp_path / "out", Path.mkdir, None, {"README.md": "a" * 5000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


def test_of_old_models_one_with_other_things_in_it_stays(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write_atomically(tmp_path / f"adapter-step-{step}", model("w"), None)
    (tmp_path / "adapter-step-1" / "notes.txt").touch()
    keep_newest(tmp_path, "adapter-step-", 1)
    assert {path.name for path in tmp_path.iterdir()} == {"adapter-step-1", "adapter-step-3"}
