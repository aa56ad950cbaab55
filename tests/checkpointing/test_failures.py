"""Disks that fill up, folders that are removed or made read-only while a run writes to them."""

import csv
import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from killed_runs import fit, in_a_child
from lightning.pytorch import Trainer
from lit_callbacks import AdapterMerger
from torture import write_recipe

from lit_ft import RecipeError
from lit_ft.checkpointing.selection import newest_good, position_of
from lit_ft.run.folder import RunFolder
from lit_ft.training import loggers
from lit_ft.training.loggers import MetricsCSV

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps, with a checkpoint after every second."""
    return write_recipe(tmp_path_factory.mktemp("failing-disks"), accumulate=1)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if (refused := subprocess.run(command, capture_output=True, text=True, check=False)).returncode:
        pytest.skip(f"no file system can be mounted: {refused.stderr.strip()}")
    yield folder
    while folder.is_mount():
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def before_call(number: int, owner: type, name: str, harm: Callable[[], None]) -> Callable[[], None]:
    """Has harm done once, before a call of a method."""

    def prepare() -> None:
        method, calls = getattr(owner, name), iter(range(1, 1000))

        def run(*arguments: object, **options: object) -> None:
            if next(calls) == number:
                harm()
            method(*arguments, **options)

        setattr(owner, name, run)

    return prepare


def before_the_third_row(harm: Callable[[], None]) -> Callable[[], None]:
    return before_call(3, loggers._MetricsFile, "save", harm)


def fill(disk: Path) -> None:
    with (disk / "filler").open("wb", buffering=0) as file:
        while file.write(bytes(4096)) == 4096:
            pass


def make_read_only(disk: Path) -> None:
    # Of a mount on top: the file system itself has files that are open for writing.
    for options in (["--bind", str(disk), str(disk)], ["-o", "remount,ro,bind", str(disk)]):
        subprocess.run(["mount", *options], check=True)


def error_lines(said: str) -> list[str]:
    assert "Traceback" not in said
    return [line for line in said.splitlines() if line.startswith("lit_ft: ")]


def steps(run: Path) -> list[int]:
    with (run / "metrics.csv").open(newline="") as file:
        return [int(row["step"]) for row in csv.DictReader(file) if row["train/loss"]]


def test_a_disk_that_fills_up_while_metrics_are_written(tmp_path: Path, recipe: Path, disk: Path) -> None:
    def fill_up() -> None:
        with pytest.raises(OSError, match="No space left"):
            fill(disk)

    run = disk / "run"
    options = ["--run_dir", str(run), "--resume", "auto"]
    codes, said = fit(tmp_path, recipe, *options, prepare=before_the_third_row(fill_up))
    assert codes == {2}, said
    (line,) = error_lines(said)
    assert f"error: '{run}/metrics.csv' could not be written: No space left on device; checkpoints" in line
    position = position_of(newest_good(run / "checkpoints"))
    assert position is not None
    assert position.global_step == 2
    (disk / "filler").unlink()
    codes, said = fit(tmp_path, recipe, *options)
    assert codes == {0}, said
    assert steps(run) == [0, 1, 2, 3]


def test_a_disk_that_is_full_from_the_start(tmp_path: Path, recipe: Path, disk: Path) -> None:
    with pytest.raises(OSError, match="No space left"):
        fill(disk)
    codes, said = fit(tmp_path, recipe, "--run_dir", str(disk / "run"))
    assert codes == {2}, said
    (line,) = error_lines(said)
    assert "could not be written: No space left on device; make room" in line


def test_a_disk_that_is_full_when_the_adapter_is_written(tmp_path: Path, recipe: Path, disk: Path) -> None:
    def fill_up() -> None:
        with pytest.raises(OSError, match="No space left"):
            fill(disk)
        os.truncate(disk / "filler", (disk / "filler").stat().st_size - 8192)  # room for the metrics

    run = disk / "run"
    options = ["--run_dir", str(run), "--resume", "auto"]
    codes, said = fit(tmp_path, recipe, *options, prepare=before_call(1, AdapterMerger, "on_train_end", fill_up))
    assert codes == {2}, said
    (line,) = error_lines(said)
    assert "could not be written: No space left on device; all 4 steps are saved: make room, then give the same" in line
    (disk / "filler").unlink()
    codes, said = fit(tmp_path, recipe, *options)
    assert codes == {0}, said
    assert (run / "adapter" / "adapter_model.safetensors").exists()


def test_a_row_that_did_not_fit_is_taken_back_whole(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def log_until_full() -> None:
        logger = MetricsCSV(RunFolder(tmp_path))
        logger.log_metrics({"epoch": 0, "train/loss": 1.0}, step=0)
        logger.save()
        size = (tmp_path / "metrics.csv").stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 5, size + 5))
        logger.log_metrics({"epoch": 0, "train/loss": 2.0}, step=1)
        for _ in range(2):
            with pytest.raises(RecipeError, match="metrics.csv' could not be written: File too large; checkpoints"):
                logger.save()

    assert in_a_child(log_until_full) == 0, capfd.readouterr().err
    assert (tmp_path / "metrics.csv").read_text() == "epoch,step,train/loss\n0,0,1.0\n"


def test_rows_that_earlier_versions_ran_together_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("epoch,step,train/loss\n0,0,1.0\n0,1,20,1,2.0\n0,1\n0,2,3.0\n")
    logger = MetricsCSV(RunFolder(tmp_path), resumed_step=3)
    logger.log_metrics({"epoch": 0, "train/loss": 4.0}, step=3)
    logger.save()
    assert (tmp_path / "metrics.csv").read_text() == "epoch,step,train/loss\n0,0,1.0\n0,2,3.0\n0,3,4.0\n"


def test_a_run_folder_that_becomes_read_only(tmp_path: Path, recipe: Path, disk: Path) -> None:
    run = disk / "run"
    harm = before_the_third_row(lambda: make_read_only(disk))
    codes, said = fit(tmp_path, recipe, "--run_dir", str(run), prepare=harm)
    assert codes == {2}, said
    (line,) = error_lines(said)
    assert f"error: '{run}/metrics.csv' could not be written: Read-only file system; checkpoints" in line
    position = position_of(newest_good(run / "checkpoints"))
    assert position is not None
    assert position.global_step == 2


@pytest.mark.parametrize(
    ("owner", "name", "number"),
    [(loggers._MetricsFile, "save", 3), (Trainer, "save_checkpoint", 3)],
    ids=["before metrics", "before a checkpoint"],
)
def test_a_run_folder_that_is_removed(tmp_path: Path, recipe: Path, owner: type, name: str, number: int) -> None:
    run = tmp_path / "run"
    # Renamed: while a folder is being removed, TensorBoard's thread may add a file to it.
    harm = before_call(number, owner, name, lambda: run.rename(tmp_path / "elsewhere"))
    codes, said = fit(tmp_path, recipe, "--run_dir", str(run), prepare=harm)
    assert codes == {2}, said
    (line,) = error_lines(said)
    assert "removed" in line
    assert str(run) in line
    assert not run.exists()  # half of it would look like a run


def test_a_run_folder_that_is_removed_and_made_anew(tmp_path: Path, recipe: Path) -> None:
    run = tmp_path / "run"

    def replace() -> None:
        run.rename(tmp_path / "elsewhere")  # the logger may add files to a folder that is being removed
        run.mkdir()
        (run / ".lock").touch()

    harm = before_call(3, Trainer, "save_checkpoint", replace)
    codes, said = fit(tmp_path, recipe, "--run_dir", str(run), prepare=harm)
    assert codes == {2}, said
    (line,) = error_lines(said)
    assert f"error: run_dir='{run}' was removed or replaced while the run ran" in line
    assert not (run / "checkpoints").exists()


def test_metrics_that_are_removed_are_missed(tmp_path: Path) -> None:
    logger = MetricsCSV(RunFolder(tmp_path))
    logger.log_metrics({"epoch": 0, "train/loss": 1.0}, step=0)
    logger.save()
    (tmp_path / "metrics.csv").unlink()
    logger.log_metrics({"epoch": 0, "train/loss": 2.0}, step=1)
    with pytest.warns(UserWarning, match=r"metrics.csv was removed while the run ran, with the rows before this one"):
        logger.save()
    assert steps(tmp_path) == [1]
