"""Any combination of options trains what a plain loop trains, and goes on bit for bit wherever it was stopped.

``LIT_FT_LOOP_EXAMPLES=200 pytest tests/checkpointing/test_fit_progress_property.py`` draws more combinations than
the default run.
"""

import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loops import Run, Stop, plain_losses
from ranks import on_ranks
from shared_fixtures import make_rows

pytestmark = pytest.mark.slow

EXAMPLES = int(os.environ.get("LIT_FT_LOOP_EXAMPLES", "5"))
MOMENTS = ("batch", "backward", "validation", "validation_batch", "should_stop")


@st.composite
def runs(draw: Any, ranks: int) -> dict[str, Any]:
    """Options of a run, and when it is stopped."""
    streaming, accumulate = draw(st.booleans()), draw(st.integers(1, 4))
    schedule = draw(st.none() | st.just({0: accumulate}) | st.just({1: accumulate, 2: 2}))
    whole = max(schedule.values()) if schedule else accumulate
    limits = [1.0, whole * 2, *([] if streaming else [1, 3, 5, 0.4, 0.7])]
    if schedule and 4 % accumulate == 0 and 4 % whole:
        limits.append(4)
    limit = draw(st.sampled_from(limits))
    if streaming and schedule and isinstance(limit, int) and any(limit % factor for factor in schedule.values()):
        limit = 1.0
    interval: Any = draw(st.sampled_from([1.0, 1, 2] if streaming else [1.0, 0.5, 1, 2]))
    if isinstance(limit, int):
        interval = min(interval, limit) if isinstance(interval, int) else interval
    trainer = {
        "max_epochs": 3,
        "limit_train_batches": limit,
        "val_check_interval": interval,
        "check_val_every_n_epoch": draw(st.sampled_from([1, 2] + [None] * isinstance(interval, int))),
        "reload_dataloaders_every_n_epochs": draw(st.sampled_from([0, 1])),
        "max_steps": draw(st.sampled_from([-1, 3, 5])),
        **({} if schedule else {"accumulate_grad_batches": accumulate}),
    }
    data = {
        "streaming": streaming,
        "shuffle_buffer": draw(st.sampled_from([5, 9, 40])),
        "micro_batch_size": draw(st.integers(1, 3)),
        "packing": draw(st.sampled_from([None, 96])),
        "shuffle": draw(st.booleans()),
        "join_micro_batches": draw(st.booleans()),
        "mixing": draw(st.sampled_from(["concatenate", "first_exhausted", "all_exhausted"])),
    }
    counts = draw(st.sampled_from([(21,), (13, 8)]))
    if len(counts) == 1:
        data["mixing"] = "concatenate"
    return {
        "counts": counts,
        "run": {"ranks": ranks, "data": data, "trainer": trainer, "schedule": schedule},
        "stop": (draw(st.sampled_from(MOMENTS)), draw(st.integers(1, 9))),
    }


def compare(model_folder: str, drawn: dict[str, Any], folder: Path) -> None:
    """On this process, which is one of the run's ranks."""
    sources = [(str(folder / f"rows{number}.jsonl"), count) for number, count in enumerate(drawn["counts"])]
    run = Run(model_folder, sources, str(folder / "val.json"), **drawn["run"])
    whole = run.fit(folder)
    losses, weights = plain_losses(run, 3)
    assert whole.losses == pytest.approx(losses, rel=1e-4)
    for name, tensor in whole.weights.items():
        torch.testing.assert_close(tensor, weights[name], atol=5e-5, rtol=1e-4, msg=name)
    path = folder / "stopped.ckpt"
    moment, number = drawn["stop"]
    before = run.fit(folder, Stop(moment, number, path))
    if not path.exists():  # the run had ended by then
        return
    after = run.fit(folder, ckpt_path=str(path))
    assert after.step == whole.step
    for name, tensor in whole.weights.items():
        assert torch.equal(after.weights[name], tensor), name
    assert before.losses | after.losses == whole.losses


def write_data(folder: Path, counts: tuple[int, ...]) -> None:
    for number, count in enumerate(counts):
        text = "".join(json.dumps(row) + "\n" for row in make_rows(count, seed=number))
        (folder / f"rows{number}.jsonl").write_text(text)
    (folder / "val.json").write_text(json.dumps(make_rows(4, seed=9)))


def profile(examples: int) -> Any:
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    return settings(max_examples=examples, derandomize=True, deadline=None, database=None, suppress_health_check=checks)


def test_any_options_train_what_a_plain_loop_trains(model_folder: str) -> None:
    @profile(EXAMPLES)
    @given(runs(ranks=1))
    def check(drawn: dict[str, Any]) -> None:
        with TemporaryDirectory() as folder:
            write_data(Path(folder), drawn["counts"])
            compare(model_folder, drawn, Path(folder))

    check()


@pytest.mark.processes
def test_any_options_train_what_a_plain_loop_trains_on_two_ranks(model_folder: str) -> None:
    @profile(max(1, EXAMPLES // 5))
    @given(runs(ranks=2))
    def check(drawn: dict[str, Any]) -> None:
        with TemporaryDirectory() as folder:
            write_data(Path(folder), drawn["counts"])
            on_ranks(2, compare, model_folder, drawn, Path(folder))

    check()
