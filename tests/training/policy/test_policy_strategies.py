"""Every strategy draws the same answers and computes the same steps as one process does; also after a resume."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from compared_strategies import STRATEGIES
from ranks import LiveRanks
from sampled_answers import assert_same_runs, fit, write_questions

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("policy")]  # its tests share ranks and fits


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_questions(tmp_path_factory.mktemp("questions"))


def _fit(make_trainer: Any, folder: str, path: str, how: dict[str, Any], name: str) -> Any:
    strategy, world, replicas = STRATEGIES[name]
    return fit(make_trainer, folder, path, {**how, "replicas": replicas}, world, strategy)


WAYS: dict[str, dict[str, Any]] = {"adapter": {"model": {"kl_weight": 0.5}}, "everything": {"model": {"peft": None}}}


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *((name, "adapter") for name in ("ddp", "fsdp", "zero3", "tp2", "cp2", "pp2")),
        *((name, "everything") for name in ("fsdp", "zero3", "tp2", "cp2 x pp2")),  # with a head that trains
    ],
)
def test_same_numbers(
    make_trainer: Any,
    model_folder: str,
    questions: str,
    kept: dict[str, Any],
    live_ranks: LiveRanks,
    name: str,
    way: str,
) -> None:
    if way not in kept:
        kept[way] = fit(make_trainer, model_folder, questions, WAYS[way])
    world = STRATEGIES[name][1]
    ranks = live_ranks(world, _fit, make_trainer, model_folder, questions, WAYS[way], name, timeout=100)
    weights = ranks[0][2]  # which other ranks do not keep under some strategies
    for steps, means, _ in ranks:
        assert_same_runs((steps, means, weights), kept[way], 2e-5)


@pytest.mark.parametrize("name", ["fsdp", "zero3"])
def test_a_rank_without_a_prompt_computes_what_others_wait_for(
    make_trainer: Any, model_folder: str, questions: str, kept: dict[str, Any], live_ranks: LiveRanks, name: str
) -> None:
    """In the first step too, where the reference is compared with the model."""
    three = str(Path(questions).with_name("val.json"))
    how = {"model": {"kl_weight": 0.5}, "data": {"micro_batch_size": 1, "val_path": None}}
    if "three" not in kept:
        kept["three"] = fit(make_trainer, model_folder, three, how)
    ranks = live_ranks(2, _fit, make_trainer, model_folder, three, how, name, timeout=60)
    assert_same_runs((*ranks[0][:2], ranks[0][2]), kept["three"], 2e-5)


@pytest.mark.parametrize("name", ["zero3", "cp2 x pp2"])
def test_a_resumed_run_draws_the_same_answers(
    make_trainer: Any, model_folder: str, questions: str, live_ranks: LiveRanks, tmp_path: Path, name: str
) -> None:
    """From checkpoints that all ranks write together."""
    how = {"save_after": 3, "save": str(tmp_path / "three.ckpt")}
    ranks = partial(live_ranks, STRATEGIES[name][1], _fit, make_trainer, model_folder, questions, timeout=100)
    (one, means, _), *_ = ranks(how, name)
    (steps, same, _), *_ = ranks({"resume": how["save"]}, name)
    assert steps == one[3:]
    assert same == means[3:]
