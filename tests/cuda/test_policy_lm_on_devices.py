"""Policy optimization on a GPU: the answers and the numbers of a CPU; where there is none, its own on the CPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from devices import DEVICES, accelerator_of
from sampled_answers import fit, judged_answers, save_reward_model, write_questions

from lit_ft import RewardModel


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_questions(tmp_path_factory.mktemp("questions"))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("model", [{}, {"peft": None}])
def test_steps_are_those_of_a_cpu(
    device: str, model: dict[str, Any], make_trainer: Any, model_folder: str, questions: str
) -> None:
    on_cpu, means, _ = fit(make_trainer, model_folder, questions, {"model": model})
    how = {"model": model, "trainer": {"accelerator": accelerator_of(device)}}
    steps, same, _ = fit(make_trainer, model_folder, questions, how)
    assert [loss for loss, _ in steps] == pytest.approx([loss for loss, _ in on_cpu], rel=1e-2, abs=1e-4)
    for got, want in zip(same, means, strict=True):
        assert got == pytest.approx(want, rel=1e-2, abs=1e-3)


@pytest.mark.parametrize("device", DEVICES)
def test_a_reward_model_scores_on_the_device_of_the_run(device: str, tmp_path: Path) -> None:
    folder = save_reward_model(tmp_path)
    here, there = RewardModel(folder), RewardModel(folder)
    there.device = torch.device(device)
    assert there.of(judged_answers()) == pytest.approx(here.of(judged_answers()), rel=1e-3, abs=1e-4)
