"""A resumed run takes what the recipe has changed since, and keeps all else of the checkpoint."""

from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from peft import LoraConfig
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import (
    CyclicLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from lit_ft import CausalLM, RecipeError, TextDataModule
from lit_ft.training.optimizers.configure import (
    MATRICES,
    SplitOptimizer,
    check_total_steps,
    configure_optimizers,
    describe_own_rates,
)
from lit_ft.training.optimizers.recipe_options import GIVEN, RecipeOptions
from lit_ft.training.optimizers.schedules import CosineWithWarmup, LinearWithWarmup

LORA = LoraConfig(r=4, target_modules=["q_proj"])
Schedule = Callable[[Optimizer], Any]

IN_TWO_PARTS = partial(SplitOptimizer, matrices=partial(SGD, lr=0.1), others=partial(AdamW, lr=0.1))


def made(make: Callable[..., Optimizer], schedule: Schedule | None) -> tuple[Optimizer, list[Any], RecipeOptions]:
    """Optimizer of two groups, of which the second has four times the learning rate; its schedule; its options."""
    torch.manual_seed(0)
    groups = [{"params": [nn.Parameter(torch.ones(2, 2))], MATRICES: True}]
    optimizer = make([*groups, {"params": [nn.Parameter(torch.ones(2))], MATRICES: False}])
    optimizer.param_groups[1]["lr"] = optimizer.param_groups[1]["lr"] * 4
    schedules = [] if schedule is None else [schedule(optimizer)]
    return optimizer, schedules, RecipeOptions(optimizer, schedules)


def train(optimizer: Optimizer, schedules: list[Any], steps: int) -> list[list[float]]:
    """Learning rates of both groups in each of some steps."""
    rates = []
    for _ in range(steps):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.ones_like(parameter)
        rates.append([float(group["lr"]) for group in optimizer.param_groups])
        optimizer.step()
        for one in schedules:
            one.step(1.0) if isinstance(one, ReduceLROnPlateau) else one.step()
    return rates


def resumed(
    first: Callable[..., Optimizer], then: Callable[..., Optimizer], schedule: Schedule | None, second: Any = None
) -> tuple[Optimizer, list[Any]]:
    """Optimizer of a run of another recipe after three steps of the first one's."""
    optimizer, schedules, _ = made(first, schedule)
    train(optimizer, schedules, 3)
    saved = deepcopy(optimizer.state_dict()), [deepcopy(one.state_dict()) for one in schedules]
    optimizer, schedules, options = made(then, second or schedule)
    optimizer.load_state_dict(saved[0])
    for one, state in zip(schedules, saved[1], strict=True):
        one.load_state_dict(state)
    options.take_over(optimizer, schedules)
    return optimizer, schedules


def in_sequence(optimizer: Optimizer) -> LRScheduler:
    return SequentialLR(optimizer, [StepLR(optimizer, 1, gamma=0.5), StepLR(optimizer, 2, gamma=0.1)], milestones=[2])


SCHEDULES: dict[str, Schedule | None] = {
    "none": None,
    "LinearWithWarmup": partial(LinearWithWarmup, warmup=2, total_steps=9),
    "CosineWithWarmup": partial(CosineWithWarmup, total_steps=9),
    "StepLR": partial(StepLR, step_size=2, gamma=0.3),
    "SequentialLR": in_sequence,
    "ReduceLROnPlateau": partial(ReduceLROnPlateau, patience=0),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_rates_are_those_of_a_run_that_had_the_new_one_from_the_start(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    low, high = partial(SGD, lr=0.02), partial(SGD, lr=0.1)
    optimizer, schedules = resumed(high, low, SCHEDULES[name])
    wanted = train(*made(low, SCHEDULES[name])[:2], 9)[3:]
    assert train(optimizer, schedules, 6) == [pytest.approx(rates) for rates in wanted]
    assert "by the recipe, lr is 0.02, no longer 0.1; lr is 0.08, no longer 0.4" in caplog.text


@pytest.mark.parametrize("name", SCHEDULES)
def test_rates_may_be_tensors(name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    low, high = (lambda groups, lr=rate: AdamW(groups, lr=torch.tensor(lr)) for rate in (0.02, 0.1))
    optimizer, schedules = resumed(high, low, SCHEDULES[name])
    assert all(torch.is_tensor(group["lr"]) for group in optimizer.param_groups)
    wanted = train(*made(partial(AdamW, lr=0.02), SCHEDULES[name])[:2], 9)[3:]
    assert train(optimizer, schedules, 6) == [pytest.approx(rates) for rates in wanted]
    assert "by the recipe, lr is 0.02, no longer 0.1; lr is 0.08, no longer 0.4" in caplog.text
    caplog.clear()
    resumed(low, low, SCHEDULES[name])
    assert "by the recipe" not in caplog.text


def test_a_tensor_is_a_rate_of_each_group(caplog: pytest.LogCaptureFixture, make_trainer: Any) -> None:
    caplog.set_level("INFO")
    module, given = BoringModel(), torch.tensor(1e-2)
    module.trainer = make_trainer()
    make = partial(configure_optimizers, module, partial(AdamW, lr=given), lr_factors={"bias": 0.1})
    optimizer = make()
    assert isinstance(optimizer, Optimizer)
    assert [float(group["lr"]) for group in optimizer.param_groups] == [pytest.approx(1e-2), pytest.approx(1e-3)]
    make(partial(LinearWithWarmup, warmup=2, total_steps=9))  # writes its first rate, 0, into the tensors of its groups
    assert float(given) == pytest.approx(1e-2)
    assert "takes learning rates from its own options" not in caplog.text


def test_an_unchanged_recipe_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    make, schedule = partial(AdamW, lr=0.1), SCHEDULES["LinearWithWarmup"]
    optimizer, schedules = resumed(make, make, schedule)
    assert train(optimizer, schedules, 6) == train(*made(make, schedule)[:2], 9)[3:]
    assert "by the recipe" not in caplog.text
    assert "goes on at" not in caplog.text


def test_a_schedule_of_another_length_has_its_own_rate_from_the_next_step_on(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    make = partial(SGD, lr=0.1)
    short, long = (partial(CosineWithWarmup, total_steps=steps) for steps in (3, 9))
    optimizer, schedules = resumed(make, make, short, long)
    assert train(optimizer, schedules, 6) == train(*made(make, long)[:2], 9)[3:]
    assert "the learning rate goes on at 0.075, by the recipe's schedule and run length" in caplog.text
    assert "it was 0" in caplog.text


def test_rates_that_a_schedule_sets_itself_are_those_of_its_options() -> None:
    first, then = (partial(OneCycleLR, max_lr=rate, total_steps=9) for rate in (0.1, 0.2))
    optimizer, schedules = resumed(partial(SGD, lr=0.1), partial(SGD, lr=0.3), first, then)
    wanted = train(*made(partial(SGD, lr=0.1), then)[:2], 8)[3:]
    assert train(optimizer, schedules, 5) == [pytest.approx(rates) for rates in wanted]


def test_a_rate_that_has_no_effect_is_said() -> None:
    one, two = ([nn.Parameter(torch.ones(2))] for _ in range(2))
    for make, first in ((partial(OneCycleLR, total_steps=9), 0.008), (partial(CyclicLR, base_lr=0.01), 0.01)):
        optimizer = SGD(one, lr=0.5, momentum=0.9)
        note = describe_own_rates(make(optimizer, max_lr=0.2), [0.5], optimizer)
        assert note is not None
        assert f"takes learning rates from its own options (from {first} on), so that optimizer.lr=0.5 has no" in note
    optimizer = SGD([{"params": one}, {"params": two, "lr": 2.0}], lr=0.5, momentum=0.9)
    note = describe_own_rates(OneCycleLR(optimizer, max_lr=0.2, total_steps=9), [0.5, 2.0], optimizer)
    assert note is not None
    assert "so that optimizer.lr and model.lr_factors have no effect; set them there, as max_lr" in note
    for schedule in filter(None, SCHEDULES.values()):
        optimizer = SGD(one, lr=0.5)
        assert describe_own_rates(schedule(optimizer), [0.5], optimizer) is None


def test_a_pipeline_stage_has_groups_of_its_own() -> None:
    module, names = BoringModel(), ["layer.weight", "layer.bias", "head.weight"]
    make = partial(configure_optimizers, module, partial(SGD, lr=0.1), lr_factors={"bias": 2.0, "head": 4.0})
    with pytest.raises(RecipeError, match="'head' is found in no weight's name"):
        make()
    configured = make(names=names)
    assert isinstance(configured, Optimizer)
    assert [group["lr"] for group in configured.param_groups] == [0.1, 0.2]
    schedule: Any = partial(LinearWithWarmup, total_steps=9)
    optimizer, schedules, options = made(partial(SGD, lr=0.1), schedule)
    schedules[0].base_lrs = [0.1]  # those of the first stage, in the checkpoint
    options.take_over(optimizer, schedules)
    assert train(optimizer, schedules, 3) == train(*made(partial(SGD, lr=0.1), schedule)[:2], 3)


@pytest.mark.parametrize(
    ("first", "then", "said"),
    [
        (
            partial(StepLR, step_size=2, gamma=0.3),
            partial(StepLR, step_size=2, gamma=0.5),
            "gamma=0.5 has no effect, 0.3",
        ),
        (
            partial(MultiStepLR, milestones=[1, 3]),
            partial(MultiStepLR, milestones=[1]),
            r"milestones=\[1\] .*\[1, 3\] ho",
        ),
        (
            partial(ReduceLROnPlateau, patience=0),
            partial(ReduceLROnPlateau, patience=2),
            "patience=2 has no effect, 0 h",
        ),
    ],
)
def test_an_option_of_a_schedule_that_has_no_effect_is_said(first: Schedule, then: Schedule, said: str) -> None:
    make = partial(SGD, lr=0.1)
    with pytest.warns(UserWarning, match=f"lr_scheduler: {said}.* goes on as in the checkpoint"):
        optimizer, schedules = resumed(make, make, first, then)
    assert train(optimizer, schedules, 6) == train(*made(make, first)[:2], 9)[3:]


def test_a_schedule_that_would_end_the_run_is_refused(make_trainer: Any) -> None:
    schedule = OneCycleLR(SGD([nn.Parameter(torch.ones(1))], lr=1, momentum=0.9), max_lr=1.0, total_steps=2)
    for fits in ({"max_epochs": 2}, {"max_epochs": 3, "max_steps": 2}, {"max_epochs": -1}):
        check_total_steps(schedule, make_trainer(**fits))
    with pytest.raises(RecipeError, match=r"2 times .total_steps., and would end .* trainer.max_epochs=3; give both"):
        check_total_steps(schedule, make_trainer(max_epochs=3))


def test_a_schedule_that_would_end_a_run_of_max_steps_is_refused_before_its_first_step(
    make_trainer: Any, model_folder: str, write_rows: Any
) -> None:
    schedule: Any = partial(OneCycleLR, max_lr=1e-3, total_steps=1)
    for max_steps, is_refused in ((3, False), (4, True)):  # two steps in an epoch
        module, trainer = (
            CausalLM(model_folder, lr_scheduler=schedule),
            make_trainer(max_epochs=-1, max_steps=max_steps),
        )
        with pytest.raises(RecipeError, match="trainer.max_steps=4; give total_steps") if is_refused else nullcontext():
            trainer.fit(module, TextDataModule(write_rows(count=8), micro_batch_size=4))
        assert trainer.global_step == (0 if is_refused else 3)


def test_decay_and_betas_too(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    then = partial(AdamW, lr=0.1, betas=(0.8, 0.9), weight_decay=0.5, eps=1e-6)
    optimizer, _ = resumed(partial(AdamW, lr=0.1), then, None)
    for group in optimizer.param_groups:
        assert (group["betas"], group["weight_decay"], group["eps"]) == ((0.8, 0.9), 0.5, 1e-6)
        assert group[GIVEN]["weight_decay"] == 0.5
    assert [float(one["step"]) for one in optimizer.state.values()] == [3, 3]
    assert "betas is (0.8, 0.9), no longer (0.9, 0.999); eps is 1e-06," in caplog.text


def test_the_parts_of_an_optimizer() -> None:
    then = partial(SplitOptimizer, matrices=partial(SGD, lr=0.02), others=partial(AdamW, lr=0.1, weight_decay=0.5))
    optimizer, _ = resumed(IN_TWO_PARTS, then, None)
    assert isinstance(optimizer, SplitOptimizer)
    assert [group["lr"] for part in optimizer.parts for group in part.param_groups] == [0.02, 0.4]
    assert optimizer.parts[1].param_groups[0]["weight_decay"] == 0.5


def test_what_cannot_change_is_said() -> None:
    with pytest.warns(UserWarning, match=r"amsgrad=True has no effect: its state was made with False; the resumed run"):
        optimizer, _ = resumed(partial(AdamW, lr=0.1), partial(AdamW, lr=0.1, amsgrad=True), None)
    assert not any(group["amsgrad"] for group in optimizer.param_groups)


def test_a_checkpoint_of_an_earlier_version_goes_on_as_it_did() -> None:
    optimizer, _, _ = made(partial(SGD, lr=0.1), None)
    saved = optimizer.state_dict()
    for group in saved["param_groups"]:
        del group[GIVEN]
    optimizer, _, options = made(partial(SGD, lr=0.02), None)
    optimizer.load_state_dict(saved)
    with pytest.warns(UserWarning, match="does not record what the recipe gave .* goes on with the checkpoint's"):
        options.take_over(optimizer, [])
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.4]


# --- runs ----------------------------------------------------------------------------------------------


@pytest.fixture
def stopped(make_trainer: Any, model_folder: str, write_rows: Any, tmp_path: Path) -> Callable[..., Callable[..., Any]]:
    """Function that trains two steps, and gives a function that resumes the run with other options of the module."""

    def train_two_steps(**options: Any) -> Callable[..., Any]:
        data, path = write_rows(), str(tmp_path / "saved.ckpt")
        trainer = make_trainer(max_steps=2)
        trainer.fit(CausalLM(model_folder, peft=LORA, **options), TextDataModule(data, micro_batch_size=2))
        trainer.save_checkpoint(path)

        def resume(**changed: Any) -> Any:
            module = CausalLM(model_folder, peft=LORA, **changed)
            trainer = make_trainer(max_steps=4)
            trainer.fit(module, TextDataModule(data, micro_batch_size=2), ckpt_path=path)
            return trainer

        return resume

    return train_two_steps


@pytest.mark.slow
def test_other_groups_are_refused(stopped: Any) -> None:
    with pytest.raises(
        RecipeError, match=r"\[4\] weights \(no lr_factors\), the recipe's .*\[2, 2\] .*'lora_B'\); .* config.yaml"
    ):
        stopped()(lr_factors={"lora_B": 16.0})
    with pytest.raises(RecipeError, match=r"\[2, 2\] weights \(.* 'lora_B'\), the recipe's .*\[2, 2\] .*'lora_A'\); "):
        stopped(lr_factors={"lora_B": 16.0})(lr_factors={"lora_A": 16.0})
    stopped(lr_factors={"lora_B": 16.0})(lr_factors={"lora_B[.]": 16.0})  # the same weights


@pytest.mark.slow
def test_a_schedule_that_comes_or_goes_is_said(stopped: Any) -> None:
    schedule = partial(LinearWithWarmup, warmup=0, total_steps=8)
    with pytest.warns(UserWarning, match="lr_scheduler: the checkpoint has none, so that it begins at its first step"):
        stopped()(lr_scheduler=schedule)
    with pytest.raises(
        RecipeError, match="of another lr_scheduler than StepLR, with lr_lambdas and not gamma, step_size"
    ):
        stopped(lr_scheduler=schedule)(lr_scheduler=partial(StepLR, step_size=1))
    with pytest.warns(UserWarning, match="has one and the recipe none: the learning rate stays at 7.5e-05; to go on"):
        trainer = stopped(lr_scheduler=schedule)()
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(7.5e-5)
