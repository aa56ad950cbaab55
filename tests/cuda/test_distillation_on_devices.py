"""Distillation on a GPU: the answers and the numbers of a CPU; where there is none, its own on the CPU."""

from typing import Any

import pytest
from devices import DEVICES, accelerator_of
from sampled_answers import write_questions
from taught_models import fit, write_teacher


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_questions(tmp_path_factory.mktemp("questions"))


@pytest.fixture(scope="module")
def folders(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return model_folder, write_teacher(tmp_path_factory.mktemp("teacher"))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("model", [{"peft": None, "kd_ratio": 0.75}, {"on_policy": 1.0}])
def test_steps_are_those_of_a_cpu(
    device: str, model: dict[str, Any], make_trainer: Any, folders: tuple[str, str], questions: str
) -> None:
    on_cpu, means, _ = fit(make_trainer, folders, questions, {"model": model})
    how = {"model": model, "trainer": {"accelerator": accelerator_of(device)}}
    steps, same, _ = fit(make_trainer, folders, questions, how)
    assert [loss for loss, _ in steps] == pytest.approx([loss for loss, _ in on_cpu], rel=1e-2, abs=1e-4)
    for got, want in zip(same, means, strict=True):
        assert got == pytest.approx(want, rel=1e-2, abs=1e-3)
