"""``--ckpt_path best`` is the best by the monitored metric, ``last`` the end of the run, in every command."""

import json
import os
import re
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from command_line import losses, recipe
from lit_callbacks.output.quantities import as_count
from shared_fixtures import make_rows

from lit_ft.checkpointing.selection import best_known
from lit_ft.cli import main

pytestmark = pytest.mark.slow

STEPS = 7
BEST_EACH_3 = {"val_check_interval": 3, "check_val_every_n_epoch": None}
MONITORS = {"class_path": "ModelCheckpoint", "init_args": {"monitor": "val/loss"}}


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> Callable[..., str]:
    """Run a command in this process; returns what it said."""
    caplog.set_level("INFO", "lightning.pytorch")

    def run(*arguments: str, code: int = 0) -> str:
        capsys.readouterr()
        caplog.clear()
        with pytest.raises(SystemExit) as stop:
            main(list(arguments))
        text = caplog.text + capsys.readouterr().err
        assert stop.value.code == code, text
        return text

    return run


@pytest.fixture
def fit(said: Any, tmp_path: Path, model_folder: str, write_rows: Any) -> Callable[..., tuple[Path, str]]:
    """Train with callbacks of a recipe; returns the run's folder and what it said."""

    def train(*callbacks: dict[str, Any], options: list[str] | None = None, **trainer: Any) -> tuple[Path, str]:
        arguments = recipe(tmp_path, model_folder, write_rows(), max_steps=STEPS, **trainer)
        file = Path(arguments[-1])
        content = yaml.safe_load(file.read_text())
        content["trainer"]["callbacks"] = list(callbacks)
        file.write_text(yaml.safe_dump(content))
        folder = tmp_path / "run"
        told = said(*arguments, "--data.val_fraction", "0.2", "--run_dir", str(folder), *(options or []))
        return folder, told

    return train


def steps(run: Path) -> set[int]:
    """Optimizer steps of a run's checkpoints."""
    found = [torch.load(path, weights_only=True) for path in (run / "checkpoints").glob("*.ckpt")]
    return {content["global_step"] for content in found if "loops" in content}


def next_line(told: str) -> list[str]:
    (line,) = re.findall(r"next: python -m lit_ft (.*)", told)
    return shlex.split(line)


def test_every_command_takes_the_best(fit: Any, said: Any) -> None:
    run, told = fit(MONITORS, options=["--lr_scheduler", "null", "--optimizer.lr", "5"], **BEST_EACH_3)
    by_step = losses(run, "val/loss")
    best = min(by_step, key=by_step.__getitem__)
    assert len(by_step) == 2
    assert steps(run) == {best + 1, STEPS}
    config = ["--config", str(run / "config.yaml"), "--ckpt_path", "best"]
    (path,) = [one for one in (run / "checkpoints").glob("*.ckpt") if one.name != "last.ckpt"]
    named = f"the best checkpoint is {path}, of val/loss {by_step[best]:.4g}"
    for command in ("validate", "predict", "test"):
        # `test` has no data but the held-out part, which it does not take
        assert named in said(command, *config, *(["--data.test_path", _rows(run)] if command == "test" else []))
    assert next_line(told) == ["export", "--run", str(run), "--ckpt_path", "best", "--merge"]
    assert named in said(*next_line(told))
    before = (run / "adapter" / "adapter_model.safetensors").read_bytes()
    assert named in said("export", "--run", str(run), "--ckpt-path", "best")
    assert (run / "adapter" / "adapter_model.safetensors").read_bytes() == before
    assert (run / "adapter-best" / "adapter_model.safetensors").read_bytes() != before
    for folder, step in (("adapter", max(by_step)), ("adapter-best", best), ("merged-best", best)):
        assert f"| val/loss | {by_step[step]:.4g} |" in (run / folder / "README.md").read_text(), folder
    last = said("fit", *config[:2], "--ckpt_path", "last")
    assert f"done: nothing was left to train after {STEPS} optimizer steps; see {run}" in last
    assert next_line(last) == ["predict", *config]  # the best is merged
    goes_on = said("fit", *config)
    assert named in goes_on
    assert f"done: {as_count(STEPS - best - 1, 'optimizer step')} after {best + 1} earlier ones in " in goes_on


def _rows(run: Path) -> str:
    path = run.parent / "test.json"
    path.write_text(json.dumps(make_rows(3)))
    return str(path)


@pytest.mark.parametrize(
    ("callbacks", "trainer"),
    [
        ([MONITORS], BEST_EACH_3),
        ([], BEST_EACH_3),
        ([{"class_path": "ModelCheckpoint", "init_args": {"save_weights_only": True}}], {}),
        ([{"class_path": "ModelCheckpoint", "init_args": {"dirpath": "elsewhere", "save_last": "link"}}], {}),
    ],
)
def test_the_end_of_the_run_is_always_saved(
    fit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, callbacks: Any, trainer: dict[str, Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    run, _ = fit(*callbacks, **trainer)
    assert max(steps(run)) == STEPS


def test_no_best_is_an_error_with_the_reason(fit: Any, said: Any) -> None:
    other = {"class_path": "ModelCheckpoint", "init_args": {"monitor": "train/loss", "filename": "other"}}
    run, _ = fit(MONITORS, other, **BEST_EACH_3)
    config = ["--config", str(run / "config.yaml"), "--ckpt_path", "best"]
    assert "several metrics are monitored, name the file: " in said("validate", *config, code=2)
    for path in (run / "checkpoints").glob("*.ckpt"):
        content = torch.load(path, weights_only=True)
        of_loss, of_step = (
            {"monitor": monitor, "best_model_path": "gone.ckpt", "best_model_score": 2.0}
            for monitor in ("val/loss", "step")
        )
        content["callbacks"] = {"one": of_loss, "newest": of_step}
        torch.save(content, path)
    assert "gone.ckpt, of val/loss 2, is no longer there" in said("validate", *config, code=2)
    assert "several" not in said("validate", *config[:2], "--ckpt_path", "last")
    for path in (run / "checkpoints").glob("*.ckpt"):
        torch.save(torch.load(path, weights_only=True) | {"callbacks": {}}, path)
    assert "no ModelCheckpoint with a monitor has saved one" in said("validate", *config, code=2)


def test_a_run_without_checkpoints(fit: Any) -> None:
    run, told = fit(enable_checkpointing=False)
    assert not (run / "checkpoints").exists()
    assert (run / "adapter").is_dir()
    assert next_line(told) == ["chat", str(run / "adapter")]


def test_the_next_command_merges_the_best_where_it_is_not_merged(fit: Any, said: Any) -> None:
    falls = ["--lr_scheduler", "null", "--optimizer.lr", "0.001", "--merge"]
    run, told = fit(MONITORS, options=falls, val_check_interval=STEPS, check_val_every_n_epoch=None)
    config = ["--config", str(run / "config.yaml"), "--ckpt_path"]
    assert next_line(told) == ["predict", *config, "best"]  # the best is the end, which is merged
    (best,) = best_known(run / "checkpoints")
    exported = ["export", "--run", str(run), "--ckpt_path", "best", "--merge"]
    (run / "merged" / "manifest.json").unlink()
    assert next_line(said("fit", *config, "last", "--merge", "false")) == exported
    said(*exported)
    assert next_line(said("fit", *config, "last", "--merge", "false")) == ["predict", *config, "best"]
    os.utime(best.path, (time.time() + 60,) * 2)  # a later one
    assert next_line(said("fit", *config, "last", "--merge", "false")) == exported


@pytest.mark.parametrize("merge", [True, False])
def test_the_next_command_answers_where_nothing_is_to_be_merged(fit: Any, said: Any, merge: bool) -> None:
    prompt = {"model": {"peft": {"class_path": "peft.PromptTuningConfig", "init_args": {"num_virtual_tokens": 2}}}}
    options = ["--merge"] if merge else ["--model.peft", json.dumps(prompt["model"]["peft"])]
    run, told = fit(options=options)
    command = next_line(told)
    assert command == ["predict", "--config", str(run / "config.yaml"), "--ckpt_path", "last"]
    assert "4 answers: " in said(*command, "--max_new_tokens", "2")


def test_the_best_of_a_step_that_another_callback_saves_first(fit: Any) -> None:
    every_epoch = {"class_path": "ModelCheckpoint", "init_args": {"every_n_epochs": 1, "save_last": True}}
    run, told = fit(every_epoch, MONITORS, options=["--trainer.max_steps", "-1", "--trainer.max_epochs", "1"])
    ((path, monitor, _),) = best_known(run / "checkpoints")
    assert (path.parent, monitor) == (run / "checkpoints", "val/loss")
    assert f"export --run {run} --ckpt_path best --merge" in told
