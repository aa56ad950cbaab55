"""``benchmarks.speed.step_profile``: its code runs on a CPU with a tiny model."""

from collections import Counter
from pathlib import Path

import pytest
import torch

from benchmarks.speed import step_profile
from benchmarks.speed.step_profile import Times, product, purpose_of, saved_storages, summary

DATA = "recipes/data/quickstart_train.json"


def test_products_are_told_apart_by_the_dimensions_of_the_model() -> None:
    assert product({64, 128}, [[30, 64], [64, 128]]) == ("N x 64 x 128", 2 * 30 * 64 * 128)


@pytest.mark.parametrize(
    ("name", "shapes", "purpose"),
    [
        ("aten::mm", [[30, 64], [64, 128]], "products"),
        ("aten::mm", [[30, 64], [64, 8]], "LoRA"),
        ("aten::addmm_", [[30, 128], [30, 24], [24, 128]], "LoRA"),  # three adapters side by side
        ("torch_attn::_varlen_attn", [[30, 4, 16]], "attention"),
        ("aten::_scaled_dot_product_cudnn_attention_backward", [[1, 4, 30, 16]], "attention"),
        ("aten::silu", [[30, 128]], "elementwise"),
        ("triton_poi_fused_mul_silu_0", [], "elementwise"),
        ("aten::embedding", [[1024, 64]], "rest"),
    ],
)
def test_purposes(name: str, shapes: list[list[int]], purpose: str) -> None:
    assert purpose_of(name, shapes, rank=8) == purpose


def test_idle_time_is_what_is_left_of_the_wall_clock() -> None:
    times = Times(Counter(), Counter(), Counter(products=6_000, attention=2_000))
    lines = summary(times, seconds=0.01, steps=2).splitlines()
    assert lines[2:4] == ["| products | 3.00 | 60.0% |", "| attention | 1.00 | 20.0% |"]
    assert lines[-2:] == ["| idle | 1.00 | 20.0% |", "| wall clock | 5.00 | 100.0% |"]


def test_saved_bytes_are_those_of_activations() -> None:
    layer = torch.nn.Linear(8, 16)
    inputs = torch.randn(3, 8, requires_grad=True)
    with saved_storages(layer) as saved:
        layer(inputs).exp().sum().backward()
    assert sum(saved.values()) == (3 * 8 + 3 * 16) * 4  # inputs of the product, and what exp gave


@pytest.mark.slow
@pytest.mark.parametrize("rows", [["--rows", "48"], ["--rows", "5", "--row-tokens", "70", "--all-linear"]])
def test_a_profile_of_a_tiny_shape(tmp_path: Path, capsys: pytest.CaptureFixture[str], rows: list[str]) -> None:
    options = ["--device", "cpu", "--shape", "tiny", "--data", DATA, "--folder", str(tmp_path), "--top", "100"]
    step_profile.main([*options, *rows])
    numbers = {
        cells[1].strip(): cells[2].strip()
        for line in capsys.readouterr().out.splitlines()
        if (cells := line.split("|"))[1:]
    }
    assert {"frozen weights", "kept for the backward pass", *step_profile.PURPOSES} <= set(numbers)
    of_mlp = f"aten::{'addmm_' if '--all-linear' in rows else 'mm'} N x 64 x 128"  # added to LoRA's product, or alone
    assert {"aten::mm N x 64 x 1024", of_mlp, "aten::silu", "all products", "all"} <= set(numbers)
    # The wall clock is that of other steps, without the profiler, and on a busy machine any step may take long.
    assert float(numbers["wall clock"]) > 0
    assert float(numbers["attention"]) > 0
    assert 0 < float(numbers["LoRA"]) < float(numbers["all"])
    assert 0 < float(numbers["all products"]) < float(numbers["all"])
