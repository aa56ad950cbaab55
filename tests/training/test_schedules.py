from functools import partial
from typing import Any

import pytest
import torch
from transformers import get_cosine_with_min_lr_schedule_with_warmup, get_wsd_schedule

from lit_ft import CausalLM, TextDataModule
from lit_ft.errors import RecipeError
from lit_ft.training.optimizers.schedules import ConstantWithWarmup, CosineWithWarmup, LinearWithWarmup


def rates(scheduler_class: type, warmup: float, steps: int = 10) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    scheduler = scheduler_class(optimizer, warmup, total_steps=steps)
    values = []
    for _ in range(steps):
        values.append(round(optimizer.param_groups[0]["lr"], 4))
        optimizer.step()
        scheduler.step()
    return values


def test_linear_by_share_and_by_steps() -> None:
    wanted = [0.0, 1.0, 2.0, 1.75, 1.5, 1.25, 1.0, 0.75, 0.5, 0.25]
    assert rates(LinearWithWarmup, 0.2) == wanted
    assert rates(LinearWithWarmup, 2) == wanted


def test_cosine() -> None:
    assert rates(CosineWithWarmup, 0.0, 4) == [2.0, 1.7071, 1.0, 0.2929]


def test_constant() -> None:
    assert rates(ConstantWithWarmup, 2, 5) == [0.0, 1.0, 2.0, 2.0, 2.0]


@pytest.mark.parametrize("warmup", [0, 3])
def test_cosine_to_a_fraction_is_that_of_transformers(warmup: int) -> None:
    theirs = partial(
        get_cosine_with_min_lr_schedule_with_warmup,
        num_warmup_steps=warmup,
        num_training_steps=10,
        min_lr_rate=0.1,
    )
    ours = partial(CosineWithWarmup, warmup=warmup, total_steps=10, final_fraction=0.1)
    of_both = []
    for build in (theirs, ours):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
        scheduler, values = build(optimizer), []
        for _ in range(11):
            values.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        of_both.append(values)
    assert of_both[0] == pytest.approx(of_both[1], abs=1e-12)
    assert of_both[1][-1] == pytest.approx(0.2)


@pytest.mark.parametrize(("decay_type", "schedule"), [("cosine", CosineWithWarmup), ("linear", LinearWithWarmup)])
def test_a_stable_part_is_that_of_transformers(decay_type: str, schedule: type[LinearWithWarmup]) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    lengths = {"num_warmup_steps": 2, "num_stable_steps": 10, "num_decay_steps": 8}
    theirs = get_wsd_schedule(optimizer, **lengths, decay_type=decay_type, min_lr_ratio=0.1).lr_lambdas[0]
    for stable in (10, 0.5):
        ours = schedule(optimizer, 2, total_steps=20, final_fraction=0.1, stable=stable)
        # Theirs begins the warm-up at the final fraction.
        assert [ours.factor(step) for step in range(2, 22)] == pytest.approx([theirs(step) for step in range(2, 22)])
        assert ours.warning is None
    assert "stable" not in ours.state_dict()
    assert "never decays; lower lr_scheduler.stable" in str(schedule(optimizer, 2, total_steps=12, stable=10).warning)
    with pytest.raises(RecipeError, match=r"stable=1.5 must be a share below 1 or a whole number"):
        schedule(optimizer, stable=1.5)


def test_linear_to_a_fraction() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    schedule = LinearWithWarmup(optimizer, total_steps=4, final_fraction=0.5)
    assert [schedule.factor(step) for step in range(6)] == [1.0, 0.875, 0.75, 0.625, 0.5, 0.5]
    assert "final_fraction" not in schedule.state_dict()  # a resumed run takes it from its recipe
    with pytest.raises(RecipeError, match="total_steps=0 must be 1 or more"):
        LinearWithWarmup(optimizer, total_steps=0)
    with pytest.raises(RecipeError, match="final_fraction=-2e-05 must be"):
        LinearWithWarmup(optimizer, final_fraction=-2e-5)


def test_a_resumed_run_may_be_longer() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    short = LinearWithWarmup(optimizer, 0, total_steps=4)
    for _ in range(4):
        optimizer.step()
        short.step()
    assert optimizer.param_groups[0]["lr"] == 0
    longer = LinearWithWarmup(optimizer, 0, total_steps=8)
    longer.load_state_dict(short.state_dict())
    optimizer.step()
    longer.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(2.0 * 3 / 8)


@pytest.mark.parametrize("warmup", [-1, 2.5])
def test_warmup_that_makes_no_sense(warmup: float) -> None:
    with pytest.raises(RecipeError, match="share below 1 or a whole number"):
        rates(LinearWithWarmup, warmup)


def test_a_schedule_that_ends_before_the_run_says_so(make_trainer: Any, model_folder: str, write_rows: Any) -> None:
    module = CausalLM(model_folder, lr_scheduler=partial(LinearWithWarmup, total_steps=2))
    with pytest.warns(UserWarning, match="total_steps=2 is less than the run's 3 optimizer steps"):
        make_trainer(max_steps=3).fit(module, TextDataModule(write_rows()))
