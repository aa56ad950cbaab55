"""Checkpoints survive kills at any point of a save, and damage is found."""

import errno
import os
import random
import resource
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from killed_runs import in_a_child
from lit_callbacks.export import manifest
from ranks import on_ranks

from lit_ft import cli
from lit_ft.checkpointing.selection import best_known, check_resumable, newest_good, newest_of, resumed_step
from lit_ft.checkpointing.storage import checksum, replacement, sharded
from lit_ft.checkpointing.storage.checkpoint_io import AnyCheckpointIO, check_readable
from lit_ft.checkpointing.storage.integrity import DamagedCheckpoint, check_intact
from lit_ft.errors import RecipeError


def content(step: int, **more: Any) -> dict[str, Any]:
    weights = {"w": torch.full((64, 40), float(step)), "b": torch.arange(7.0)}
    return {"state_dict": weights, "global_step": step, "epoch": 0, "loops": {}, "optimizer_states": [], **more}


def save_file(path: Path, step: int) -> Path:
    AnyCheckpointIO().save_checkpoint(content(step), path)
    return path


def in_group(function: Callable[..., Any], *arguments: Any) -> Any:
    dist.init_process_group("gloo")
    try:
        return function(*arguments)
    finally:
        dist.destroy_process_group()


def save_folder(path: Path, step: int, background: bool = False) -> Path:
    """A folder of shards, written by one rank in a process of its own."""
    on_ranks(1, in_group, _save_folder, path, step, background)
    return path


def _save_folder(path: Path, step: int, background: bool) -> None:
    group = dist.new_group(backend="gloo") if background else None
    writing = sharded.save_sharded(content(step), path, [], background=group)
    if writing is not None:
        writing.result()


def step_of(path: Path) -> int:
    """The step of a checkpoint whose tensors are of that step as well."""
    found = AnyCheckpointIO().load_checkpoint(path)
    assert torch.equal(found["state_dict"]["w"], torch.full((64, 40), float(found["global_step"])))
    return int(found["global_step"])


def kill_before(call: int, functions: list[tuple[Any, str]]) -> None:
    """Have this process killed just before the ``call``-th of some functions is called."""
    calls = 0

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return run

    for owner, name in functions:
        setattr(owner, name, counted(getattr(owner, name)))


# --- single files --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mmap", [False, True])
def test_a_file_with_a_sum_is_read_by_torch_as_any_other(tmp_path: Path, mmap: bool) -> None:
    path = save_file(tmp_path / "last.ckpt", 3)
    for safe in (False, True):
        assert torch.load(path, mmap=mmap, weights_only=safe)["global_step"] == 3
    copy = shutil.copy(path, tmp_path / "elsewhere.pt")
    assert check_intact(Path(copy))


def test_a_file_of_an_earlier_version_has_no_sum_and_is_read(tmp_path: Path) -> None:
    torch.save(content(2), tmp_path / "last.ckpt")
    assert not check_intact(tmp_path / "last.ckpt")
    assert newest_good(tmp_path) == tmp_path / "last.ckpt"
    assert step_of(tmp_path / "last.ckpt") == 2


class Counted(dict[str, int]):
    """Python object, of a class of its own."""


@pytest.mark.parametrize("state", [Counted(a=1), {"a": [Fraction(1, 2)]}, (torch.ones(2), {1: Counted})])
def test_what_could_not_be_read_again_is_not_written(state: Any) -> None:
    check_readable(content(1, callbacks={"Mine": {"n": (1, None, torch.float16), "t": torch.ones(2)}}), "it")
    with pytest.raises(RecipeError, match=r"^it: callbacks holds objects of (\w+\.)*(Counted|Fraction), and no run"):
        check_readable(content(1, callbacks={"Mine": state}), "it")


def flip(path: Path, place: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ (1 << bit)]))


@pytest.mark.slow
def test_every_flipped_bit_and_every_cut_of_a_file_is_found(tmp_path: Path) -> None:
    whole, path, rng = save_file(tmp_path / "whole.ckpt", 1), tmp_path / "a.ckpt", random.Random(0)
    size = whole.stat().st_size
    ends = range(size - 110, size)  # end record, length of the comment, comment
    for place in [*ends, *(rng.randrange(size) for _ in range(200))]:
        shutil.copy(whole, path)
        flip(path, place, rng.randrange(8))
        with pytest.raises(DamagedCheckpoint):
            check_intact(path)
    for length in [0, 1, 3, *ends, *(rng.randrange(size) for _ in range(100))]:
        path.write_bytes(whole.read_bytes()[:length])
        with pytest.raises(DamagedCheckpoint):
            check_intact(path)


@pytest.mark.slow
@pytest.mark.parametrize("call", range(1, 12))
def test_a_kill_within_a_save_leaves_the_earlier_file_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    elsewhere = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else tmp_path  # another file system
    monkeypatch.setenv("TMPDIR", str(elsewhere))
    before = set(elsewhere.iterdir())
    path = save_file(tmp_path / "run" / "last.ckpt", 1)

    def save() -> None:
        kill_before(call, [(checksum._HashingFile, "write"), (os, "fsync"), (Path, "replace")])
        save_file(path, 2)

    assert in_a_child(save) in (0, -signal.SIGKILL)
    assert step_of(newest_good(path.parent)) in (1, 2)
    replacement.recover(path.parent)
    assert [found.name for found in path.parent.iterdir()] == ["last.ckpt"]
    assert set(elsewhere.iterdir()) - {tmp_path} == before - {tmp_path}


def test_a_file_is_on_the_disk_before_it_takes_the_place_of_the_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_file(tmp_path / "last.ckpt", 1)
    calls: list[str] = []
    sync, replace = os.fsync, Path.replace

    def synced(descriptor: int) -> None:
        calls.append(f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
        sync(descriptor)

    def replaced(old: Path, new: Path) -> Path:
        calls.append(f"{old.name} -> {new.name}")
        return replace(old, new)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", replaced)
    save_file(path, 2)
    new, folder = replacement.temporary_file(path).name, f"sync {tmp_path.name}"
    assert calls == [f"sync {new}", folder, f"{new} -> last.ckpt", folder]


# --- folders -------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True], ids=["sync", "async"])
def test_every_damage_to_a_folder_is_found(tmp_path: Path, background: bool) -> None:
    whole, rng = save_folder(tmp_path / "whole.ckpt", 1, background), random.Random(0)
    assert check_intact(whole)
    assert step_of(whole) == 1
    names = sorted(path.name for path in whole.iterdir())
    assert names == [".metadata", "__0_0.distcp", "manifest.json", "meta.pt"]
    path = tmp_path / "a.ckpt"
    for name in names:
        for damage in ["flip"] * 10 + ["cut"] * 3 + ["remove"]:
            shutil.rmtree(path, ignore_errors=True)
            shutil.copytree(whole, path)
            size = (path / name).stat().st_size
            if damage == "flip":
                flip(path / name, rng.randrange(size), rng.randrange(8))
            elif damage == "cut":
                os.truncate(path / name, rng.randrange(size))
            else:
                (path / name).unlink()
            with pytest.raises(DamagedCheckpoint):
                check_intact(path)


def _save_while_callbacks_go_on(path: Path) -> None:
    best, may_finish, finish = {"1.ckpt": 0.5}, threading.Event(), sharded._finish
    sharded._finish = lambda *arguments: may_finish.wait(20) and finish(*arguments)  # this process is for this alone
    checkpoint = {**content(1), "callbacks": {"ModelCheckpoint": {"best_k_models": best}}}
    writing = sharded.save_sharded(checkpoint, path, [], background=dist.new_group(backend="gloo"))
    assert writing is not None
    best["2.ckpt"] = 0.25
    may_finish.set()
    writing.result()


def test_a_folder_in_the_background_holds_what_there_was_when_it_was_asked_for(tmp_path: Path) -> None:
    on_ranks(1, in_group, _save_while_callbacks_go_on, tmp_path / "last.ckpt")
    saved = torch.load(tmp_path / "last.ckpt" / "meta.pt", weights_only=True)
    assert saved["callbacks"]["ModelCheckpoint"]["best_k_models"] == {"1.ckpt": 0.5}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Checkpoint folders of the first two steps."""
    return {step: save_folder(tmp_path_factory.mktemp("folders") / "last.ckpt", step) for step in (1, 2)}


@pytest.mark.slow
@pytest.mark.parametrize("call", range(1, 8))
@pytest.mark.parametrize(("earlier", "later"), [("folder", "folder"), ("folder", "file"), ("file", "folder")])
def test_a_kill_within_a_replacement_loses_nothing(
    tmp_path: Path, folders: dict[int, Path], call: int, earlier: str, later: str
) -> None:
    def copy_folder(path: Path, step: int) -> Path:
        return Path(shutil.copytree(folders[step], path))

    writers = {"file": save_file, "folder": copy_folder}
    path = writers[earlier](tmp_path / "run" / "last.ckpt", 1)
    new = writers[later](tmp_path / "new.ckpt", 2)
    hidden = replacement.temporary_folder(path) if later == "folder" else replacement.temporary_file(path)
    new.rename(hidden)

    def replace() -> None:
        kill_before(call, [(Path, "rename"), (Path, "replace"), (replacement, "_remove"), (replacement, "sync")])
        replacement.replace(hidden, path)

    assert in_a_child(replace) in (0, -signal.SIGKILL)
    assert step_of(newest_good(path.parent)) in (1, 2)  # what an export of the killed run takes
    replacement.recover(path.parent)
    assert step_of(newest_good(path.parent)) in (1, 2)
    assert [found.name for found in path.parent.iterdir()] == ["last.ckpt"]


def test_a_link_to_a_folder_is_replaced_and_not_followed(tmp_path: Path) -> None:
    best = save_folder(tmp_path / "epoch=0-step=1.ckpt", 1)
    (tmp_path / "last.ckpt").symlink_to(best.name)
    save_folder(tmp_path / "last.ckpt", 2)
    assert not (tmp_path / "last.ckpt").is_symlink()
    assert (step_of(best), step_of(tmp_path / "last.ckpt")) == (1, 2)


def test_what_a_killed_process_left_of_a_folder_is_not_taken_into_the_next(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    stale = replacement.temporary_folder(path)
    stale.mkdir()
    (stale / "__7_0.distcp").write_bytes(b"of a run on eight ranks")
    save_folder(path, 1)
    assert not list(path.glob("__7*"))
    assert check_intact(path)


# --- the newest good one ---------------------------------------------------------------------------------


def test_the_newest_is_the_one_of_the_latest_step_whatever_the_clock_says(tmp_path: Path) -> None:
    for step, age in ((5, 100.0), (10, 50.0), (15, 900.0)):
        os.utime(save_file(tmp_path / f"epoch=0-step={step}.ckpt", step), (1e9 - age, 1e9 - age))
    assert newest_good(tmp_path).name == "epoch=0-step=15.ckpt"
    AnyCheckpointIO().save_checkpoint({"state_dict": {}, "global_step": 99}, tmp_path / "weights-only.ckpt")
    assert newest_good(tmp_path).name == "epoch=0-step=15.ckpt"


def test_what_a_checkpoint_says_is_read_once_and_anew_after_a_replacement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, io, reads, load = tmp_path / "last.ckpt", AnyCheckpointIO(), list[Path](), torch.load

    def counted(file: Path, **options: Any) -> Any:
        reads.append(file)
        return load(file, **options)

    monkeypatch.setattr(torch, "load", counted)
    best = {"monitor": "val/loss", "best_model_path": str(path), "best_model_score": torch.tensor(0.5)}
    for step in (1, 2):
        io.save_checkpoint(content(step, callbacks={"one": best, "other": [1]}), path)
        for _ in range(3):
            assert resumed_step(path) == (step, None)
            assert best_known(tmp_path) == [(path, "val/loss", 0.5)]
    assert reads == [path, path]
    assert str(path) not in Path("/proc/self/maps").read_text()  # a removed checkpoint takes no space on the disk


def test_each_of_many_checkpoints_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [save_file(tmp_path / f"epoch=0-step={step}.ckpt", step) for step in range(70)]
    reads, load = list[Path](), torch.load
    monkeypatch.setattr(torch, "load", lambda file, **options: reads.append(file) or load(file, **options))
    assert [newest_of(tmp_path.glob("*.ckpt")) for _ in range(2)] == [paths[-1]] * 2
    assert sorted(reads) == sorted(paths)


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    good = save_file(tmp_path / "epoch=0-step=5.ckpt", 5)
    bad = (save_file if kind == "file" else save_folder)(tmp_path / "last.ckpt", 10)
    inside = bad if kind == "file" else bad / "__0_0.distcp"
    flip(inside, inside.stat().st_size // 2, 3)
    with caplog.at_level("INFO"):
        assert newest_good(tmp_path) == good
    assert f"{bad} is damaged" in caplog.text
    assert str(good) in caplog.text
    with pytest.raises(RecipeError, match="cannot be used"):
        AnyCheckpointIO().load_checkpoint(bad)
    good.unlink()
    with pytest.raises(RecipeError, match=r"no checkpoint in .* is good \(last.ckpt"):
        newest_good(tmp_path)


def test_the_newest_of_some_checkpoints_is_that_of_the_latest_step(tmp_path: Path) -> None:
    paths = [save_file(tmp_path / f"step={step}.ckpt", step) for step in (1, 2, 3, 4)]
    torch.save({"state_dict": {}, "loops": {}, "global_step": 9}, tmp_path / "weights.ckpt")  # no run resumes from it
    os.utime(paths[0], (2e9, 2e9))  # as a copy has it
    paths[3].write_bytes(b"damaged")
    assert newest_of([*paths, tmp_path / "weights.ckpt"]) == paths[2]
    assert newest_of([paths[3]]) is None


class CountsPasses(dict[str, Any]):
    """A mapping that counts how often it is gone through."""

    passes = 0

    def __iter__(self) -> Iterator[str]:
        type(self).passes += 1
        return super().__iter__()


def _save_and_load_optimizers(path: Path) -> tuple[dict[str, Any], int]:
    """Two optimizers, the second of ten layers, one of which has a name within that of another one."""
    module = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2) for name in ["a", "w", *map(str, range(10))]})
    module["w"].register_module("a", torch.nn.Linear(2, 2))
    names = [[name for name, _ in module.named_parameters() if name.startswith("a.") is kind] for kind in (True, False)]
    states = [
        {
            "state": {i: {"exp_avg": torch.full((2,), float(i)), "lr": 1} for i in range(len(of))},
            "param_groups": [{"lr": 0.1, "params": list(range(len(of)))}],
        }
        for of in names
    ]
    sharded.save_sharded({**content(1), "state_dict": module.state_dict(), "optimizer_states": states}, path, names)
    sizes = sharded._sizes
    sharded._sizes = lambda path: CountsPasses(sizes(path))  # this process is a rank of this test alone
    return sharded.load_sharded(path, module, [[of] for of in names]), CountsPasses.passes


def test_optimizer_state_is_found_by_going_once_through_what_is_saved(tmp_path: Path) -> None:
    """Going through it once for each parameter took 21 seconds of 4,000 parameters."""
    loaded, passes = on_ranks(1, in_group, _save_and_load_optimizers, tmp_path / "saved")[0]
    assert passes == 1
    for state, names in zip(loaded["optimizer_states"], loaded["optimizer_names"], strict=True):
        assert [value["exp_avg"].tolist() for value in state["state"].values()] == [[i, i] for i in range(len(names))]
        assert all(value["lr"] == 1 for value in state["state"].values())
    assert loaded["optimizer_names"][0] == ["a.weight", "a.bias"]
    assert {"w.a.weight", "w.weight"} < set(loaded["optimizer_names"][1])


def test_groups_of_a_stage_that_are_alike_stay_apart_when_stages_are_joined() -> None:
    groups = [{"lr": 0.1, "params": [0]}, {"lr": 0.1, "params": [1]}]
    stages = [["a", "B"], ["b", "A"]]
    parts = [({"state": {0: {"of": one}, 1: {"of": two}}, "param_groups": groups}, [one, two]) for one, two in stages]
    state, names = sharded.merge_optimizer_states(parts, ["a", "b", "A", "B"])
    assert names == ["a", "b", "A", "B"]
    assert [group["params"] for group in state["param_groups"]] == [[0, 1], [2, 3]]
    assert [state["state"][i]["of"] for i in range(4)] == names


def _save_on_a_full_disk(path: Path, background: bool) -> str:
    """What a rank says of a checkpoint that rank 0 alone cannot finish."""

    def write_manifest(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    sharded.write_manifest = write_manifest  # this process is a rank of this test alone
    with pytest.raises(RecipeError) as caught:
        _save_folder(path, 1, background)
    return str(caught.value)


@pytest.mark.parametrize("background", [False, True])
def test_what_rank_0_cannot_finish_fails_on_all_ranks(tmp_path: Path, background: bool) -> None:
    """The others waited for it until the time limit of their process group."""
    said = on_ranks(2, in_group, _save_on_a_full_disk, tmp_path / "saved", background, timeout=60)
    assert said[0] == said[1]
    assert "could not be written: No space left on device; make room" in said[0]
    assert not list(tmp_path.iterdir())


def _save_weights_alone(path: Path) -> None:
    weights = {name: value for name, value in content(1).items() if name != "optimizer_states"}
    sharded.save_sharded(weights, path, [["w", "b"]])


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_no_run_is_resumed_from_weights_alone(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "best.ckpt"
    if kind == "file":
        AnyCheckpointIO().save_checkpoint(
            {key: content(1)[key] for key in ("state_dict", "loops", "global_step")}, path
        )
    else:
        on_ranks(1, in_group, _save_weights_alone, path)
    assert step_of(path) == 1  # they can be read
    with pytest.raises(RecipeError, match="there is no checkpoint to resume from .*: those in it hold weights alone"):
        newest_good(tmp_path)
    with pytest.raises(RecipeError, match=r"best.ckpt' holds weights alone .* take --ckpt_path last"):
        check_resumable(path)
    save_file(tmp_path / "last.ckpt", 0)
    assert newest_good(tmp_path) == tmp_path / "last.ckpt"


# --- failures ----------------------------------------------------------------------------------------------


def test_a_full_disk_is_one_line_and_keeps_the_earlier_file(tmp_path: Path) -> None:
    path = save_file(tmp_path / "last.ckpt", 1)

    def save() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        with pytest.raises(RecipeError, match=r"could not be written: File too large; the earlier one .* is kept"):
            save_file(path, 2)

    assert in_a_child(save) == 0
    assert step_of(path) == 1
    assert [found.name for found in tmp_path.iterdir()] == ["last.ckpt"]


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_keeps_the_earlier_folder(tmp_path: Path) -> None:
    path = save_folder(tmp_path / "last.ckpt", 1)

    def save() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        with pytest.raises(RecipeError, match=r"could not be written: rank 0: .*the earlier one .* is kept"):
            _save_folder(path, 2, False)

    on_ranks(1, in_group, save)
    assert step_of(path) == 1
    assert [found.name for found in tmp_path.iterdir()] == ["last.ckpt"]


def test_a_folder_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    path = save_folder(tmp_path / "last.ckpt", 1)
    (path / "manifest.json").unlink()
    meta = torch.load(path / "meta.pt", weights_only=True)
    torch.save({k: v for k, v in meta.items() if k != "has_manifest"}, path / "meta.pt")  # as earlier versions wrote it
    assert step_of(path) == 1
    (path / "__0_0.distcp").write_bytes(b"")
    with pytest.raises(RecipeError, match="could not be read: rank 0") as failure:
        AnyCheckpointIO().load_checkpoint(path)
    assert "\n" not in str(failure.value)


# --- the command -------------------------------------------------------------------------------------------


def verify_command(*paths: Path) -> int:
    with pytest.raises(SystemExit) as end:
        cli.main(["verify", *map(str, paths)])
    return int(end.value.code or 0)


def test_verify_names_what_is_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = save_file(tmp_path / "checkpoints" / "epoch=0-step=5.ckpt", 5)
    folder = save_folder(tmp_path / "checkpoints" / "last.ckpt", 10)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    manifest.write_manifest(adapter)
    assert verify_command(tmp_path) == 0
    assert capsys.readouterr().out.count("good  ") == 3
    assert verify_command(good, folder, adapter) == 0
    flip(folder / "__0_0.distcp", 100, 1)
    (adapter / "adapter_config.json").write_text('{"r": 8}')
    capsys.readouterr()
    assert verify_command(tmp_path) == 1
    said = capsys.readouterr().out
    assert f"damaged      {folder}: with other bytes: __0_0.distcp" in said
    assert f"damaged      {adapter}: of another size: adapter_config.json" in said
    assert f"good         {good}" in said


def test_verify_does_not_call_good_what_it_cannot_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(content(1), tmp_path / "old.ckpt")
    assert verify_command(tmp_path / "old.ckpt") == 2
    assert "without sums" in capsys.readouterr().out
    assert verify_command(tmp_path / "nothing") == 2
    (tmp_path / "empty").mkdir()
    assert verify_command(tmp_path / "empty") == 2
    (tmp_path / "config.yaml").write_text("trainer: {}")
    os.mkfifo(tmp_path / "pipe")
    capsys.readouterr()
    for name, said in (("config.yaml", "is no checkpoint; name a"), ("pipe", "is neither a file nor a folder; name a")):
        assert verify_command(tmp_path / name) == 2
        assert f"{name}' {said}" in capsys.readouterr().err
    (tmp_path / "renamed").write_bytes((tmp_path / "old.ckpt").read_bytes()[:-30])
    assert verify_command(tmp_path / "renamed") == 1
    assert "it is truncated" in capsys.readouterr().out
