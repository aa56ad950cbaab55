"""Weights in half precision that are too large for a step."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.optim import SGD, Adafactor, Adagrad, AdamW, Muon

from lit_ft import CausalLM, TextDataModule
from lit_ft.training.optimizers.lost_steps import warn_of_lost_steps
from lit_ft.training.optimizers.schedules import LinearWithWarmup

CPU = SingleDeviceStrategy(torch.device("cpu"))


def make(dtype: torch.dtype) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.empty(64, 64, dtype=dtype).normal_(std=0.02, generator=torch.manual_seed(0)))


OPTIMIZERS: list[Callable[..., torch.optim.Optimizer]] = [AdamW, Adafactor, Muon, Adagrad]


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_that_are_counted_do_not_change(dtype: torch.dtype, kind: Callable[..., torch.optim.Optimizer]) -> None:
    weight = make(dtype)
    rate = 2e-5 if dtype == torch.bfloat16 else 2e-6
    optimizer = kind([weight], lr=rate, weight_decay=0.0)
    with pytest.warns(
        UserWarning, match=r"are too large for a step of optimizer.lr=2e-0\d, .* model.dtype=float32"
    ) as said:
        warn_of_lost_steps(optimizer, CPU)
    share = float(str(said[0].message).partition("%")[0]) / 100
    before = weight.detach().clone()
    for _ in range(3):
        weight.grad = torch.randn_like(weight)
        optimizer.step()
    assert (weight == before).float().mean() > 0.9 * share > 0.5


def test_what_is_stepped_in_full_is_not_warned_of() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_lost_steps(AdamW([make(torch.float32)], lr=1e-7), CPU)
        optimizer = AdamW([make(torch.bfloat16)], lr=1e-3)
        warn_of_lost_steps(optimizer, CPU)
        LinearWithWarmup(optimizer, warmup=3, total_steps=9)
        assert optimizer.param_groups[0]["lr"] == 0
        warn_of_lost_steps(optimizer, CPU)
        warn_of_lost_steps(SGD([make(torch.bfloat16)], lr=1e-7), CPU)  # its steps may be larger than its rate


def test_full_fine_tuning_in_bfloat16_is_warned_of(make_trainer: Any, model_folder: str, write_rows: Any) -> None:
    with pytest.warns(UserWarning, match="of the weights that train in half precision are too large for a step"):
        make_trainer(max_steps=1).fit(CausalLM(model_folder, dtype="bfloat16"), TextDataModule(write_rows()))
