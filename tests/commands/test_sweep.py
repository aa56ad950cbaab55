"""Sweeps as a user runs them: a grid, a search, mistakes, a crash, a kill and the same command again."""

import csv
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import ENVIRONMENT, recipe, run
from forked_commands import ForkedCommand, run_forked

pytestmark = pytest.mark.slow


@pytest.fixture
def sweep(tmp_path: Path, model_folder: str, write_rows: Any) -> list[str]:
    """A sweep's command: six steps on 12 rows, without its variations."""
    options = recipe(
        tmp_path, model_folder, write_rows(count=12), max_epochs=2, enable_checkpointing=True, limit_val_batches=1
    )
    options += ["--data.val_path", write_rows(count=4, name="val.json"), "--sweep_dir", str(tmp_path / "sweep")]
    return ["sweep", *options[1:]]


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / "sweep.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_a_crash_is_recorded_and_the_same_command_repeats_no_finished_trial(tmp_path: Path, sweep: list[str]) -> None:
    folder = tmp_path / "sweep"
    command = [*sweep, "--vary", "optimizer.lr=1e-2,1e30,1e-1"]
    done = run_forked(*command, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    rows = table(folder)
    assert [row["state"] for row in rows] == ["finished", "failed", "finished"]
    assert rows[1]["failure"].startswith("exit code 1: lit_ft: ")
    assert "NotFinite" in rows[1]["failure"]
    assert (folder / "sweep.png").read_bytes().startswith(b"\x89PNG")
    best = min((rows[0], rows[2]), key=lambda row: float(row["val/loss"]))
    assert f"best: {best['trial']} (optimizer.lr={best['optimizer.lr']}), val/loss " in done.stderr
    assert f"next: python -m lit_ft export --run {folder / best['trial']}" in done.stderr
    assert "3 trials by val/loss (min)\n  trial      optimizer.lr  val/loss" in done.stderr
    lr = yaml.safe_load((folder / "trial-003" / "config.yaml").read_text())["optimizer"]["init_args"]["lr"]
    assert lr == 0.1

    outputs = [(folder / name / "output.log").read_bytes() for name in ("trial-001", "trial-003")]
    again = run_forked(*command, env=ENVIRONMENT)
    assert again.returncode == 0, again.stderr
    assert again.stderr.count("finished already") == 2
    assert outputs == [(folder / name / "output.log").read_bytes() for name in ("trial-001", "trial-003")]
    other = run_forked(*sweep, "--vary", "optimizer.lr=1e-2,1e-3", env=ENVIRONMENT)
    assert (other.returncode, "holds another sweep" in other.stderr) == (2, True)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_sweep_goes_on(tmp_path: Path, sweep: list[str], number: int) -> None:
    folder = tmp_path / "sweep"
    command = [*sweep, "--trainer.max_epochs", "10", "--vary", "optimizer.lr=1e-2,1e-1"]
    with (tmp_path / "first.log").open("wb") as log:
        first = ForkedCommand(command, env=ENVIRONMENT, stdout=log, stderr=log, dies_with_parent=True)
        try:
            deadline = time.monotonic() + 120
            while not list((folder / "trial-001" / "checkpoints").glob("*.ckpt")) and time.monotonic() < deadline:
                assert first.poll() is None, (tmp_path / "first.log").read_text()
                time.sleep(0.05)
            first.send_signal(number)
            code = first.wait(60)
        finally:
            first.kill()
            first.wait()
    assert code == (143 if number == signal.SIGTERM else -9)
    advice = "trial-001 is stopped; the same command goes on with the sweep"
    assert (advice in (tmp_path / "first.log").read_text()) == (number == signal.SIGTERM)
    done = run_forked(*command, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    assert [row["state"] for row in table(folder)] == ["finished", "finished"]
    log_of_first = (folder / "trial-001" / "output.log").read_text()
    if number == signal.SIGTERM:
        assert "resume=auto: resuming" in log_of_first
        assert "lit_ft: stopped by SIGTERM; saved" in log_of_first
    else:  # the trial went on by itself
        assert "trial-001 still runs" in done.stderr or "1/2 optimizer.lr=1e-2: finished already" in done.stderr
        assert log_of_first.count("optimizer steps in") == 1
    with (folder / "trial-001" / "metrics.csv").open() as file:
        steps = [int(row["step"]) for row in csv.DictReader(file) if row["train/loss"]]
    assert steps == list(range(len(steps)))


def test_a_search_depends_on_earlier_results_alone(tmp_path: Path, sweep: list[str]) -> None:
    pytest.importorskip("optuna", reason="the extra `sweep` is not installed")
    folder = tmp_path / "sweep"
    vary = ["--vary", "optimizer.lr=1e-3..1e-1", "--vary", "model.peft.r=2,4", "--metric", "train/loss"]
    done = run_forked(*sweep, *vary, "--trials", "2", env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    values = [json.loads((folder / f"trial-00{n}" / "trial.json").read_text())["values"] for n in (1, 2)]
    assert all(1e-3 <= float(one["optimizer.lr"]) <= 1e-1 and one["model.peft.r"] in ("2", "4") for one in values)
    more = run_forked(*sweep, *vary, "--trials", "3", env=ENVIRONMENT)
    assert more.returncode == 0, more.stderr
    assert more.stderr.count("finished already") == 2
    assert [row["state"] for row in table(folder)] == ["finished"] * 3


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ([], "--vary"),
        (["--vary", "optimizer.lr"], "--vary 'optimizer.lr' must be KEY=VALUE,VALUE"),
        (["--vary", "optimizer.lr=1e-4,0.0001"], "lr=1e-4 and optimizer.lr=0.0001 are the same trial"),
        (["--vary", "optimizer.lr=1e-4,1e-4"], "are the same trial; name each once"),
        (["--vary", "optimizer.lr=1e-4", "--vary", "optimizer.lr=1e-3"], "--vary optimizer.lr is given twice"),
        (["--vary", "optimizer.lr=fast", "--data.system", "-"], "optimizer.lr"),
        (["--vary", "optimizer.rl=1e-4,1e-3"], "optimizer: unknown option 'rl'"),
        (["--vary", "model.peft.r=8,sixteen"], "sixteen"),
        (["--vary", "run_dir=a,b"], "--vary run_dir: the sweep sets it"),
        (["--vary", "optimizer.lr=1e-4,1e-3", "--run_dir", "x"], "--run_dir: sweep sets it for each trial"),
        (["--vary", "optimizer.lr=1e-4,1e-3", "--config", "-"], "--config -: each trial reads the recipe"),
        (["--vary", "optimizer.lr=1e-4..1e-3"], "--vary optimizer.lr is a range"),
        (["--vary", "optimizer.lr=1e-3..1e-4", "--trials", "2"], "from a lower to a higher number"),
        (["--vary", "optimizer.lr=1e-4,1e-3", "--trials", "2"], "only 2 combinations"),
        (["--vary", "optimizer.lr=1e-4..1e-3", "--trials", "0"], "--trials 0: must be at least 1"),
        (
            ["--vary", "optimizer.lr=1e-4,1e-3", "--metric", "val/los"],
            "val/los is not logged by the recipe; did you mean",
        ),
        (
            ["--vary", "optimizer.lr=1e-4,1e-3", "--metric", "val/loss/news"],
            "val/loss/news is not logged by the recipe; did you mean val/loss?",
        ),
        (["--vary", "optimizer.lr=1e-4,1e-3", "--metric", "own/score"], "add --mode min or max"),
        (["--vary", "optimizer.lr=1e-4,1e-3", "--trainer.limit_val_batches", "0"], "has no validation data"),
        (
            ["--vary", "model.init_args.objective.beta=0.1,0.5"],
            "a loss and rewards of its own, which do not compare; add --metric val/reward_accuracy",
        ),
        (
            ["--vary", "model.token_weights=null,lit_ft.DFT", "--metric", "train/loss"],
            "a training loss of its own, which do not compare; add --metric val/loss",
        ),
        (
            ["--vary", "model.init_args.kd_ratio=0.5,1.0", "--metric", "train/loss"],
            "each trial measures another divergence, or on other answers, which do not compare; add --metric val/loss",
        ),
        (
            ["--vary", "model.divergence=lit_ft.ForwardKL,lit_ft.ReverseKL", "--metric", "val/divergence"],
            "each trial measures another divergence, or on other answers",
        ),
        (["--vary", "optimizer.lr=[1e-4,1e-3"], "the values must be YAML"),
    ],
    ids=lambda value: " ".join(value)[-50:] if isinstance(value, list) else None,
)
def test_mistakes_are_one_line_before_the_first_trial(
    capsys: Any, tmp_path: Path, sweep: list[str], options: list[str], wanted: str
) -> None:
    errors = run(capsys, *sweep, *options, code=2)
    assert wanted in errors
    assert len(errors.strip().splitlines()) == 1 or "usage:" in errors
    assert not list((tmp_path / "sweep").glob("trial-*"))


def test_a_metric_that_no_trial_would_log_ends_the_sweep_before_the_first_trial_trains(
    tmp_path: Path, sweep: list[str]
) -> None:
    done = run_forked(*sweep, "--vary", "optimizer.lr=1e-2,1e-1", "--trainer.max_steps", "2", env=ENVIRONMENT)
    assert done.returncode == 2
    (error,) = [line for line in done.stderr.splitlines() if "error" in line]
    assert error.endswith(
        "error: --metric val/loss: trainer.max_steps=2 ends the run after 2 micro-batches, before its first validation "
        "after 6, so it is never logged; set trainer.val_check_interval=2 or lower, or take --metric train/loss"
    )
    assert [path.name for path in (tmp_path / "sweep").glob("trial-*")] == ["trial-001"]
    assert not (tmp_path / "sweep" / "trial-001" / "metrics.csv").exists()


def test_a_missing_optuna_is_named_with_its_install_line(
    capsys: Any, sweep: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    errors = run(capsys, *sweep, "--vary", "optimizer.lr=1e-4..1e-3", "--trials", "3", code=2)
    assert "needs the package optuna, which is not installed; pip install -e '.[sweep]'" in errors
