"""Every strategy computes the same steps by a teacher as one process does; also after a resume."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from compared_strategies import STRATEGIES, RecordMeans, fit_in_steps_of_4
from lightning.pytorch import Trainer
from lightning.pytorch.loops import utilities
from ranks import LiveRanks
from sampled_answers import SEED, assert_same_runs, data_of, write_questions
from taught_models import MEASURED, fit, steady, write_teacher

from lit_ft import DistillationLM

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("distillation")]  # its tests share ranks and fits


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_questions(tmp_path_factory.mktemp("questions"))


@pytest.fixture(scope="module")
def folders(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return model_folder, write_teacher(tmp_path_factory.mktemp("teacher"))


def _fit(make_trainer: Any, folders: tuple[str, str], path: str, how: dict[str, Any], name: str) -> Any:
    strategy, world, replicas = STRATEGIES[name]
    return fit(make_trainer, folders, path, {**how, "replicas": replicas}, world, strategy)


WAYS: dict[str, dict[str, Any]] = {
    "answers of the data": {"model": {"peft": None, "kd_ratio": 0.75}},  # with a head that trains
    "own answers": {"model": {"on_policy": 1.0, "answers_per_prompt": 2}, "data": {"val": "asked.json"}},
    "both": {"model": {"on_policy": 0.5, "kd_ratio": 0.75}},
}


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *((name, "answers of the data") for name in STRATEGIES),
        *((name, "own answers") for name in ("ddp", "fsdp", "zero3", "tp2", "cp2", "pp2")),
        ("ddp", "both"),
    ],
)
def test_same_numbers(
    make_trainer: Any,
    folders: tuple[str, str],
    questions: str,
    kept: dict[str, Any],
    live_ranks: LiveRanks,
    name: str,
    way: str,
) -> None:
    if way not in kept:
        kept[way] = fit(make_trainer, folders, questions, WAYS[way])
    world = STRATEGIES[name][1]
    ranks = live_ranks(world, _fit, make_trainer, folders, questions, WAYS[way], name, timeout=100)
    weights = ranks[0][2]  # which other ranks do not keep under some strategies
    for steps, means, _ in ranks:
        assert_same_runs((steps, means, weights), kept[way], 2e-5)


@pytest.fixture
def whole(make_trainer: Any, folders: tuple[str, str], questions: str, kept: dict[str, Any]) -> Any:
    """The run on the answers of the data in one process."""
    way = "answers of the data"
    if way not in kept:
        kept[way] = fit(make_trainer, folders, questions, WAYS[way])
    return kept[way]


@pytest.mark.parametrize("name", ["ddp", "fsdp", "zero3", "cp2 x pp2"])
def test_ranks_that_share_the_teacher(
    make_trainer: Any,
    folders: tuple[str, str],
    questions: str,
    whole: Any,
    live_ranks: LiveRanks,
    name: str,
) -> None:
    of_data = WAYS["answers of the data"]
    how = {**of_data, "model": {**of_data["model"], "shard_teacher": True}}
    ranks = live_ranks(STRATEGIES[name][1], _fit, make_trainer, folders, questions, how, name, timeout=100)
    assert_same_runs(ranks[0], whole, 2e-5)


def _validate_and_fit(make_trainer: Any, folders: tuple[str, str], path: str, name: str) -> Any:
    """``fit`` after a validation in inference mode, in which Lightning validates on NCCL; ranks share the teacher."""
    os.environ["PL_GLOBAL_SEED"] = str(SEED)
    strategy, world, replicas = STRATEGIES[name]
    how: dict[str, Any] = WAYS["answers of the data"]["model"]
    module = DistillationLM(folders[0], teacher=folders[1], shard_teacher=True, optimizer=steady, **how)
    data, record = data_of(path), RecordMeans(MEASURED, None, None)

    def validated(**options: Any) -> Trainer:
        trainer: Trainer = make_trainer(**options)
        trainer.validate(module, data, verbose=False)
        return trainer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utilities, "_distributed_is_initialized", lambda: False)
        val, weights = fit_in_steps_of_4(validated, module, data, record, {"replicas": replicas}, world, strategy)
    return record.steps, [*record.means, val], weights


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_training_after_a_validation_on_nccl(
    make_trainer: Any,
    folders: tuple[str, str],
    questions: str,
    whole: Any,
    live_ranks: LiveRanks,
    name: str,
) -> None:
    ranks = live_ranks(2, _validate_and_fit, make_trainer, folders, questions, name, timeout=100)
    assert_same_runs(ranks[0], whole, 2e-5)


@pytest.mark.parametrize("way", ["answers of the data", "own answers"])
def test_a_rank_without_a_sample_gathers_the_layers_of_the_teacher(
    make_trainer: Any, folders: tuple[str, str], questions: str, live_ranks: LiveRanks, way: str
) -> None:
    """Under DDP, where its student computes nothing that others wait for."""
    three = str(Path(questions).with_name("val.json"))
    model = {**WAYS[way]["model"], "shard_teacher": True}
    how = {"model": model, "data": {"micro_batch_size": 1, "val_path": three}}
    one = fit(make_trainer, folders, three, how)
    assert_same_runs(live_ranks(2, _fit, make_trainer, folders, three, how, "ddp", timeout=60)[0], one, 2e-5)


@pytest.mark.parametrize("name", ["fsdp", "zero3"])
@pytest.mark.parametrize("way", ["answers of the data", "own answers"])
def test_a_rank_without_a_sample_computes_what_others_wait_for(
    make_trainer: Any,
    folders: tuple[str, str],
    questions: str,
    kept: dict[str, Any],
    live_ranks: LiveRanks,
    name: str,
    way: str,
) -> None:
    three = str(Path(questions).with_name("val.json"))
    how = {**WAYS[way], "data": {"micro_batch_size": 1, "val_path": None}}
    if f"three {way}" not in kept:
        kept[f"three {way}"] = fit(make_trainer, folders, three, how)
    ranks = live_ranks(2, _fit, make_trainer, folders, three, how, name, timeout=60)
    assert_same_runs(ranks[0], kept[f"three {way}"], 2e-5)


@pytest.mark.parametrize("name", ["zero3", "cp2 x pp2"])
def test_a_resumed_run_takes_the_same_steps(
    make_trainer: Any, folders: tuple[str, str], questions: str, live_ranks: LiveRanks, tmp_path: Path, name: str
) -> None:
    """From checkpoints that all ranks write together."""
    how = {**WAYS["both"], "save_after": 3, "save": str(tmp_path / "three.ckpt")}
    ranks = partial(live_ranks, STRATEGIES[name][1], _fit, make_trainer, folders, questions, timeout=100)
    (one, means, _), *_ = ranks(how, name)
    (steps, same, _), *_ = ranks({**WAYS["both"], "resume": how["save"]}, name)
    assert steps == one[3:]
    for got, wanted in zip(same, means[3:], strict=True):  # which has what earlier steps have logged, too
        assert got == {name: wanted[name] for name in got}
