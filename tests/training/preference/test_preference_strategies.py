"""Every strategy computes the loss of pairs, and their reference, as one process does; also after a resume."""

import os
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from compared_strategies import STRATEGIES, assert_same, sgd
from lightning.pytorch import Callback
from preference_pairs import LORA, data_of, fit, write_judged, write_pairs
from ranks import LiveRanks

from lit_ft import DPO, KTO, PreferenceLM, RewardLM

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("preference")]  # its tests share ranks and fits


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_pairs(tmp_path_factory.mktemp("pairs"))


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_judged(tmp_path_factory.mktemp("judged"))


def _fit(make_trainer: Any, folder: str, path: str, how: dict[str, Any], name: str) -> Any:
    os.environ["PL_GLOBAL_SEED"] = "3"
    strategy, world, replicas = STRATEGIES[name]
    return fit(make_trainer, folder, path, {**how, "replicas": replicas}, world, strategy)


WAYS: dict[str, dict[str, Any]] = {
    "adapter": {},
    "everything": {"model": {"peft": None, "objective": DPO(beta=0.5, nll_weight=0.3)}},
    "scores": {"kind": RewardLM, "model": {"center_weight": 0.1}},
    "scores by all weights": {
        "kind": RewardLM,
        "model": {"peft": None},
        "optimizer": partial(torch.optim.SGD, lr=0.01),
    },
    "judged": {"model": {"objective": KTO(beta=0.5)}, "data": {"format": "unpaired_preference"}},
}


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *((name, "adapter") for name in ("ddp", "fsdp", "zero3", "tp2", "cp2", "pp2")),
        *((name, "everything") for name in ("fsdp", "zero3", "tp2", "cp2 x pp2")),  # with a head that trains
        *((name, "scores") for name in ("ddp", "fsdp", "zero3", "tp2", "cp2 x pp2")),
        *((name, "scores by all weights") for name in ("fsdp", "zero3", "tp2", "pp2")),
        *((name, "judged") for name in ("ddp", "fsdp", "zero3", "tp2", "cp2 x pp2")),
    ],
)
def test_same_numbers(
    make_trainer: Any,
    model_folder: str,
    pairs: str,
    judged: str,
    kept: dict[str, Any],
    live_ranks: LiveRanks,
    name: str,
    way: str,
) -> None:
    path = judged if way == "judged" else pairs
    if way not in kept:
        os.environ["PL_GLOBAL_SEED"] = "3"
        kept[way] = fit(make_trainer, model_folder, path, WAYS[way])
    one, means, weights = kept[way]
    world = STRATEGIES[name][1]
    ranks = live_ranks(world, _fit, make_trainer, model_folder, path, WAYS[way], name, timeout=100)
    found = ranks[0][2]  # which other ranks do not keep under some strategies
    for steps, same, _ in ranks:
        assert_same(steps, found, one, weights, 2e-5)
        assert same == pytest.approx(means, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("name", ["zero3", "cp2 x pp2"])
def test_a_resumed_run_has_the_reference_of_its_beginning(
    make_trainer: Any, model_folder: str, pairs: str, live_ranks: LiveRanks, tmp_path: Path, name: str
) -> None:
    """From checkpoints that all ranks write together."""
    how = {"save_after": 3, "save": str(tmp_path / "three.ckpt")}
    ranks = partial(live_ranks, STRATEGIES[name][1], _fit, make_trainer, model_folder, pairs, timeout=100)
    (one, means, _), *_ = ranks(how, name)
    (steps, same, _), *_ = ranks({"resume": how["save"]}, name)
    assert steps == one[3:]
    assert same == means


class KeepWarnings(Callback):
    """Callback that writes warnings of a process which Lightning starts to a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_fit_start(self, *_: Any) -> None:
        def write(message: Warning | str, *_: Any, **__: Any) -> None:
            with self.path.open("a") as file:
                file.write(f"{message}\n")

        warnings.showwarning = write


def test_processes_of_a_notebook_say_that_they_keep_the_reference(
    make_trainer: Any, model_folder: str, pairs: str, tmp_path: Path
) -> None:
    module = PreferenceLM(model_folder, peft=LORA, optimizer=sgd)
    keep = KeepWarnings(tmp_path / "warnings.txt")
    trainer = make_trainer(max_steps=2, strategy="ddp_notebook", devices=2, callbacks=[keep])
    trainer.fit(module, data_of(pairs, val_path=None))
    assert any(weight.any() for name, weight in module.trainable_parameters().items() if "lora_B" in name)
    assert keep.path.read_text().count("give back the trained weights, and not the reference") == 1
