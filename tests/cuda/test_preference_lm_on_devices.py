"""Preference tuning on a GPU: the numbers of a CPU, and no wait in a step; where there is none, its own on the CPU."""

from typing import Any

import pytest
from devices import DEVICES, WithoutWaiting, accelerator_of
from preference_pairs import LORA, data_of, fit, write_judged, write_pairs

from lit_ft import DPO, KTO, PreferenceLM


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_pairs(tmp_path_factory.mktemp("pairs"))


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_judged(tmp_path_factory.mktemp("judged"))


@pytest.mark.parametrize("device", DEVICES)
def test_steps_by_judged_answers_are_those_of_a_cpu(
    device: str, make_trainer: Any, model_folder: str, judged: str
) -> None:
    how: dict[str, Any] = {"model": {"objective": KTO(beta=0.5)}, "data": {"format": "unpaired_preference"}}
    on_cpu, means, _ = fit(make_trainer, model_folder, judged, how)
    trainer = {"trainer": {"accelerator": accelerator_of(device)}}
    steps, same, _ = fit(make_trainer, model_folder, judged, how | trainer)
    assert [loss for loss, _ in steps] == pytest.approx([loss for loss, _ in on_cpu], rel=1e-3)
    assert same == pytest.approx(means, rel=1e-2, abs=1e-3)


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
@pytest.mark.parametrize("is_judged", [False, True])
def test_a_warm_step_does_not_wait_for_the_device(
    device: str, make_trainer: Any, model_folder: str, pairs: str, judged: str, is_judged: bool
) -> None:
    data = data_of(judged, format="unpaired_preference", micro_batch_size=2) if is_judged else data_of(pairs)
    objective = KTO() if is_judged else DPO()
    follow = WithoutWaiting(device)
    trainer = make_trainer(accelerator=accelerator_of(device), max_steps=4, log_every_n_steps=50, callbacks=[follow])
    trainer.fit(PreferenceLM(model_folder, objective, peft=LORA, dtype="bfloat16"), data)
    assert follow.steps == 4
