"""Two processes against one, for the table of models."""

from functools import partial

import pytest

from benchmarks import parallel_comparison
from benchmarks.model_comparison import Tiny
from benchmarks.parallel_comparison import Comparison
from benchmarks.tiny_configs import tiny_config
from lit_ft.strategies import ModelParallelStrategy

pytestmark = pytest.mark.processes


def test_a_difference_and_a_failure_are_told_from_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    comparison = Comparison(Tiny(tiny_config("qwen2")).model)
    assert not comparison.differences("pipeline")
    monkeypatch.setattr(parallel_comparison, "TOLERANCE", -1.0)
    found = comparison.differences("pipeline")
    assert found.keys() == {"PP, full", "PP, LoRA"}
    assert all(how.startswith("differs by ") for how in found.values())
    three = {"TP": partial(ModelParallelStrategy, tensor_parallel_size=3)}
    monkeypatch.setattr(parallel_comparison, "STRATEGIES", {"tensor": three})
    assert "tensor 3 must make 2 ranks" in comparison.differences("tensor")["TP, full"]


def test_attention_sinks_are_sharded_with_their_heads() -> None:
    assert not Comparison(Tiny(tiny_config("granite_swa")).model).differences("tensor")
