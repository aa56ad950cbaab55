"""Layers as CUDA graphs. A CPU has none: what a graph would repeat is computed again, from the same tensors."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from architectures import save_model
from peft import LoraConfig
from torch import Tensor

from lit_ft import CausalLM
from lit_ft.packed_batch import PackedBatch, pack_samples
from lit_ft.training.loss import cuda_graphs

ROWS = ((7, 20), (5, 6, 12), (30,), (9, 9, 9), (40, 3), (2, 3, 4))
"""Lengths of the samples of each row; with a multiple of 32 they are two shapes."""


def recompute(compute: Callable[[], Any], _: object) -> tuple[Any, Callable[[], None]]:
    """In place of a graph: the function itself, whose results are copied to where the first ones are."""
    first = compute()

    def replay() -> None:
        with torch.enable_grad():
            again = compute()
        pairs = [(first, again)] if isinstance(first, Tensor) else [(first[name], again[name]) for name in first]
        for kept, new in pairs:
            kept.copy_(new)

    return first, replay


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Passes that were recorded."""
    made: list[object] = []

    def record(compute: Callable[[], Any], pool: object) -> tuple[Any, Callable[[], None]]:
        made.append(compute)
        return recompute(compute, pool)

    monkeypatch.setattr(cuda_graphs, "record", record)
    monkeypatch.setattr(cuda_graphs, "can_record", lambda _: True)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    return made


def rows_of(lengths: tuple[tuple[int, ...], ...] = ROWS) -> list[PackedBatch]:
    draw = np.random.default_rng(0)
    return [pack_samples([(ids, ids) for ids in (draw.integers(3, 300, n) for n in row)]) for row in lengths]


def module_of(folder: str, **options: Any) -> CausalLM:
    torch.manual_seed(0)
    module = CausalLM(folder, **options)
    module.configure_model()
    return module.train()


def lora() -> LoraConfig:
    return LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False, task_type="CAUSAL_LM")


def passes(module: CausalLM, rows: list[PackedBatch], accumulate: int = 1) -> list[Tensor]:
    """Loss and gradients after each row; gradients of ``accumulate`` rows add up."""
    found = []
    for number, row in enumerate(rows):
        if number % accumulate == 0:
            module.zero_grad()
        loss = module(row).loss_sum
        loss.backward()
        gradients = [p.grad.flatten() for p in module.trainable_parameters().values() if p.grad is not None]
        found.append(torch.cat([loss.detach()[None], *gradients]))
    return found


@pytest.fixture
def tiny_qwen2(tmp_path: Path) -> str:
    return save_model("qwen2", tmp_path / "model")


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("with_lora", [True, False])
def test_replayed_passes_give_the_same_numbers(
    with_lora: bool, accumulate: int, tiny_qwen2: str, recordings: list[object]
) -> None:
    peft = lora() if with_lora else None
    plain = module_of(tiny_qwen2, peft=peft)
    recorded = module_of(tiny_qwen2, peft=peft, cuda_graphs=True, pad_rows_to=32)
    wanted, found = passes(plain, rows_of(), accumulate), passes(recorded, rows_of(), accumulate)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * float(other.abs().max()))
    assert len(recordings) == 2 * 1  # rows of 32 tokens came five times, of 64 once
