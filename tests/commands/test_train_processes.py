"""Real processes: two ranks equal one; a stopped run, resumed, equals one that was not stopped."""

import json
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import ENVIRONMENT, assert_same_run, losses, recipe
from forked_commands import ForkedCommand, run_forked
from shared_fixtures import make_rows

pytestmark = pytest.mark.processes


def lit_ft(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return run_forked(*arguments, env=ENVIRONMENT)


@pytest.mark.parametrize("dealt", ["joined", "apart", "streamed"])
def test_two_ranks_equal_one_process(tmp_path: Path, model_folder: str, write_rows: Any, dealt: str) -> None:
    # 21 rows in steps of 8: the last step of an epoch holds 5, which two ranks of micro-batch 2 cannot share evenly.
    sources: list[dict[str, Any]]
    sources = [{"path": write_rows(count=count, name=f"{name}.json")} for name, count in (("a", 9), ("b", 12))]
    weighted = [{**source, "weight": 1} for source in sources] if dealt == "streamed" else sources
    one, two = tmp_path / "one", tmp_path / "two"
    length = {"max_steps": 6} if dealt == "streamed" else {"max_epochs": 2}
    arguments = recipe(tmp_path, model_folder, None, **length)
    if dealt == "streamed":
        arguments += ["--data.streaming", "true", "--data.shuffle_buffer", "7", "--data.mixing", "first_exhausted"]
    arguments += ["--data.sources", json.dumps(weighted), "--data.val_sources", json.dumps(sources)]
    done = lit_ft(*arguments, "--run_dir", str(one), "--trainer.accumulate_grad_batches", "4")
    assert done.returncode == 0, done.stderr
    options = [
        "--trainer.devices",
        "2",
        "--trainer.strategy",
        "ddp",
        "--trainer.accumulate_grad_batches",
        "2",
    ]
    done = lit_ft(*arguments, "--run_dir", str(two), *options, "--data.join_micro_batches", str(dealt != "apart"))
    assert done.returncode == 0, done.stderr
    assert len(losses(one)) == 6
    assert_same_run(two, one, 1e-6)
    for name in ("train/loss/a", "train/loss/b", "val/loss/a", "val/loss/b"):
        assert losses(two, name) == pytest.approx(losses(one, name), rel=1e-6)
        assert losses(one, name)


def test_two_ranks_answer_each_row_once_in_order(tmp_path: Path, model_folder: str, write_rows: Any) -> None:
    # Seven rows in micro-batches of 2: the ranks have a different number of batches, and the last is not full.
    rows = [{"id": f"q{i}", **row} for i, row in enumerate(make_rows(7))]
    arguments = ["predict", *recipe(tmp_path, model_folder, None)[1:], "--data.test_path", write_rows(rows)]
    arguments += ["--max_new_tokens", "4"]
    two = ["--trainer.devices", "2", "--trainer.strategy"]
    for name, options in (("one", []), ("two", [*two, "ddp"]), ("forked", [*two, "ddp_fork"])):
        done = lit_ft(*arguments, "--run_dir", str(tmp_path / name), *options)
        assert done.returncode == 0, done.stderr
    answers = (tmp_path / "two" / "predictions.jsonl").read_text(encoding="utf-8")
    assert [json.loads(line)["id"] for line in answers.splitlines()] == [row["id"] for row in rows]
    for other in ("one", "forked"):
        assert answers == (tmp_path / other / "predictions.jsonl").read_text(encoding="utf-8")
    assert [path.name for path in (tmp_path / "two").glob("predictions*")] == ["predictions.jsonl"]


def stop_after(run_dir: Path, arguments: list[str], steps: int, number: signal.Signals, ranks: int = 1) -> str:
    """Start a run, send it a signal once it has logged some steps; returns what it wrote."""
    said = run_dir.with_name("said")
    with said.open("wb") as errors:
        process = ForkedCommand([*arguments, "--run_dir", str(run_dir)], env=ENVIRONMENT, stderr=errors)
    deadline = time.monotonic() + 120
    while not (run_dir / "metrics.csv").is_file() or len(losses(run_dir)) < steps:
        assert process.poll() is None, said.read_text()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(number)
    assert process.wait(120) == 128 + number, said.read_text()
    return said.read_text()


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory, model_folder: str) -> Callable[[int], tuple[list[str], Path]]:
    """Arguments of a run of ten epochs on one rank or two, and its folder; each is made once."""
    folder = tmp_path_factory.mktemp("whole")
    data = folder / "rows.json"
    data.write_text(json.dumps(make_rows(21), ensure_ascii=False), encoding="utf-8")

    def run(ranks: int) -> tuple[list[str], Path]:
        arguments = recipe(folder, model_folder, str(data), max_epochs=10, accumulate_grad_batches=2)
        arguments += ["--model.peft.lora_dropout", "0.2"]
        arguments += ["--trainer.devices", str(ranks), "--trainer.strategy", "ddp" if ranks > 1 else "auto"]
        if not (whole := folder / str(ranks)).exists():
            done = lit_ft(*arguments, "--run_dir", str(whole))
            assert done.returncode == 0, done.stderr
        return arguments, whole

    return run


@pytest.mark.xdist_group("stopped runs")  # they share whole runs
@pytest.mark.parametrize(
    ("number", "ranks"),
    [(signal.SIGINT, 1), (signal.SIGTERM, 1), (signal.SIGTERM, 2)],
    ids=["ctrl-c", "term", "term-ddp"],
)
def test_a_stopped_run_resumed_equals_one_that_was_not(
    tmp_path: Path, whole_run: Any, number: signal.Signals, ranks: int
) -> None:
    arguments, whole = whole_run(ranks)
    stopped = tmp_path / "stopped"
    errors = stop_after(stopped, arguments, 5, number, ranks)
    (command,) = re.findall(r"resume with: python -m lit_ft (.*)", errors)
    assert len(losses(stopped)) < len(losses(whole))
    done = lit_ft(*shlex.split(command))
    assert done.returncode == 0, done.stderr
    assert_same_run(stopped, whole, 0)
