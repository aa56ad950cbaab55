"""Each "no" of the table of optimizers is refused with its reason, by what a run asks before weights are read."""

import tracemalloc  # noqa: F401 (pytest imports it when a DeepSpeed optimizer of `built` fails in `__del__`)
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import bitsandbytes
import pytest
import schedulefree
import torch
from lit_ft.optimizers import SplitOptimizer
from torch.optim import Optimizer

from benchmarks.support_tables import headings
from lit_ft import RecipeError
from lit_ft.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from lit_ft.training.optimizers.compatibility import NOT_LISTED, OPTIMIZERS, check_situation
from lit_ft.training.optimizers.configure import MATRICES
from lit_ft.training.optimizers.galore import GaLoreAdamW


def groups() -> list[dict[str, Any]]:
    return [{"params": [torch.nn.Parameter(torch.ones(2, 2))], MATRICES: True}]


BUILT: dict[str, Callable[[], Optimizer]] = {
    "fused": lambda: torch.optim.AdamW(groups(), fused=True),
    "schedulefree.*": lambda: schedulefree.AdamWScheduleFree(groups()),
    "bitsandbytes.optim.*8bit": lambda: bitsandbytes.optim.AdamW(groups(), optim_bits=8),
    **{
        f"bitsandbytes.optim.*{name}*": partial(getattr(bitsandbytes.optim, name), groups(), lr=1e-3)
        for name in ("Adam", "Lion", "RMSprop", "Adagrad", "LAMB")
    },
    **{
        f"bitsandbytes.optim.*{name}*": partial(getattr(bitsandbytes.optim, name), groups(), lr=1e-3, momentum=0.9)
        for name in ("SGD", "LARS")
    },
    "lit_ft.optimizers.SplitOptimizer": lambda: SplitOptimizer(groups(), torch.optim.Muon, torch.optim.AdamW),
    "lit_ft.galore.GaLoreAdamW": lambda: GaLoreAdamW(groups()),
}


def built(name: str) -> Optimizer:
    if name in BUILT:
        return BUILT[name]()
    package, _, kind = name.rpartition(".")
    if package == "torch.optim":
        return getattr(torch.optim, kind)(groups())
    of_class: type[Optimizer] = getattr(import_module(package), kind)
    return of_class.__new__(of_class)  # DeepSpeed's would compile kernels


CHECKS: dict[str, list[Callable[[Optimizer], None]]] = {
    "shards": [FSDPStrategy().check_optimizer, ModelParallelStrategy().check_optimizer],
    "zero": [DeepSpeedStrategy().check_optimizer],
    "scaled": [partial(check_situation, name="scaled")],
}


@pytest.mark.parametrize("situation", CHECKS)
@pytest.mark.parametrize("row", OPTIMIZERS, ids=lambda row: row.name)
def test_each_no_is_refused_with_its_reason(row: Any, situation: str) -> None:
    optimizer, reason = built(row.name), getattr(row, situation)
    assert row.applies_to(optimizer)
    for check in CHECKS[situation]:
        if reason is None:
            check(optimizer)
            continue
        with pytest.raises(RecipeError) as error:
            check(optimizer)
        kind = type(optimizer)
        assert str(error.value).startswith(f"optimizer={kind.__module__}.{kind.__name__} {reason}; ")


def test_each_situation_is_tested() -> None:
    assert list(CHECKS) == list(headings(NOT_LISTED))


def test_an_optimizer_that_is_not_listed() -> None:
    class Unheard(torch.optim.SGD):
        pass

    optimizer = Unheard(groups(), fused=True)
    with pytest.raises(RecipeError, match=r"Unheard was not compared .*; take one of torch.optim's AdamW, Adam, SGD, "):
        check_situation(optimizer, "shards")
    with pytest.warns(UserWarning, match="Unheard: ZeRO makes one flat vector of all weights"):
        check_situation(optimizer, "zero")
