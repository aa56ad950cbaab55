"""Preference tuning on a GPU: the numbers of a CPU, and no wait in a step; where there is none, its own on the CPU."""

from typing import Any

import pytest
from devices import DEVICES, WithoutWaiting, accelerator_of
from preference_pairs import LORA, data_of, fit, write_pairs

from lit_ft import DPO, PreferenceLM


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_pairs(tmp_path_factory.mktemp("pairs"))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("model", [{}, {"peft": None, "objective": DPO(beta=0.5, nll_weight=0.3)}])
def test_steps_are_those_of_a_cpu(
    device: str, model: dict[str, Any], make_trainer: Any, model_folder: str, pairs: str
) -> None:
    on_cpu, means, _ = fit(make_trainer, model_folder, pairs, {"model": model})
    how = {"model": model, "trainer": {"accelerator": accelerator_of(device)}}
    steps, same, _ = fit(make_trainer, model_folder, pairs, how)
    assert [loss for loss, _ in steps] == pytest.approx([loss for loss, _ in on_cpu], rel=1e-3)
    assert same == pytest.approx(means, rel=1e-2, abs=1e-3)


@pytest.mark.parametrize("device", DEVICES)
def test_a_warm_step_does_not_wait_for_the_device(
    device: str, make_trainer: Any, model_folder: str, pairs: str
) -> None:
    follow = WithoutWaiting(device)
    trainer = make_trainer(accelerator=accelerator_of(device), max_steps=4, log_every_n_steps=50, callbacks=[follow])
    trainer.fit(PreferenceLM(model_folder, peft=LORA, dtype="bfloat16"), data_of(pairs, micro_batch_size=2))
    assert follow.steps == 4
