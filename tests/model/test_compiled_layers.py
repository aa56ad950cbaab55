"""Decoder layers as graphs: their number for rows of any kind, and the numbers that they give."""

import copy
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from architectures import save_model
from peft import LoraConfig
from torch._dynamo.utils import counters

from lit_ft import CausalLM, RecipeError
from lit_ft.model.attention.segments import LEAST_SAMPLES
from lit_ft.packed_batch import PackedBatch, pack_samples

ROWS = ((7, 25, 40), (30,), (5, 6), (64,))
"""Lengths of the samples of each row: one sample or several, of other numbers and lengths."""


class Passes(NamedTuple):
    """Losses of all rows, the gradient of each, and what torch.compile made of the layers."""

    losses: list[float]
    gradients: list[torch.Tensor]
    graphs: int
    breaks: int
    padding: float | None


def rows_of(lengths: tuple[tuple[int, ...], ...] = ROWS) -> list[PackedBatch]:
    draw = np.random.default_rng(0)
    return [pack_samples([(ids, ids) for ids in (draw.integers(3, 300, n) for n in row)]) for row in lengths]


def passes(folder: str, rows: list[PackedBatch], lora: bool = True, **options: Any) -> Passes:
    """Forward and backward pass of each row by a new model."""
    torch.compiler.reset()
    counters.clear()
    torch.manual_seed(0)
    targets = ["q_proj", "v_proj", "gate_proj", "up_proj"]
    peft = LoraConfig(r=4, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM")
    module = CausalLM(folder, peft=peft if lora else None, **options)
    module.configure_model()
    module.train()
    losses, gradients = [], []
    for row in rows:
        module.zero_grad()
        loss = module(row).loss_sum
        loss.backward()
        losses.append(float(loss.detach()))
        gradients.append(torch.cat([p.grad.flatten() for p in module.trainable_parameters().values()]))
    found = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    return Passes(losses, gradients, *found, module._packed.take_padding_share())


def assert_same(found: Passes, wanted: Passes) -> None:
    assert found.losses == pytest.approx(wanted.losses, rel=1e-6)
    for one, other in zip(found.gradients, wanted.gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * float(other.abs().max()))


@pytest.mark.slow
@torch._inductor.config.patch(fallback_by_default=True)  # inductor's graphs without its C++ code
def test_values_that_are_narrower_than_keys_compile_where_samples_have_one_length(tmp_path: Path) -> None:
    """Inductor looks for attention in operators that SDPA becomes without a kernel, and failed on what it found."""
    folder, rows = save_model("deepseek_v3", tmp_path / "model", layers=1), rows_of(((7, 7, 7), (12, 12)))
    assert_same(passes(folder, rows, lora=False, compile=True), passes(folder, rows, lora=False))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lora", "checkpointing", "backend", "chosen", "graphs"),
    [
        (True, False, "eager", ROWS, 4),  # the first layer's inputs need no gradients, the others' do
        (True, True, "eager", ROWS[::2], 2),  # rows of several samples
        (False, True, "eager", ROWS[:2], 2),
        (False, "selective", "aot_eager", ROWS[::2], 1),
        (False, False, "aot_eager", ((30, 30), (7, 7, 7), (12, 12)), 1),
        (False, True, "eager", ((7, 25, 40), (64,), (8, 8, 8), (30,), (12, 12), (5, 6)), 3),
    ],
)
def test_a_layer_is_one_graph_for_one_sample_one_for_several_and_one_for_those_of_one_length(
    lora: bool, checkpointing: Any, backend: str, chosen: tuple[tuple[int, ...], ...], graphs: int, tiny_qwen2: str
) -> None:
    rows = rows_of(chosen)
    options = {"lora": lora, "gradient_checkpointing": checkpointing}
    compiled = passes(tiny_qwen2, rows, **options, compile=backend)
    assert (compiled.graphs, compiled.breaks) == (graphs, 0)
    assert_same(compiled, passes(tiny_qwen2, rows, **options))


@pytest.fixture
def tiny_qwen2(tmp_path: Path) -> str:
    """Four equal layers."""
    return save_model("qwen2", tmp_path / "model")


@pytest.mark.slow
def test_a_copy_of_a_compiled_model_computes_with_its_own_weights(tiny_qwen2: str) -> None:
    """A merge compares the logits of a copy, once with the adapter and once without."""
    module = CausalLM(tiny_qwen2, compile="eager", attn_implementation="sdpa")
    module.configure_model()
    copied, ids = copy.deepcopy(module.model), torch.arange(3, 20)[None]
    with torch.no_grad():
        logits = module.model(input_ids=ids).logits
        for parameter in module.model.model.layers.parameters():
            parameter.zero_()
        torch.testing.assert_close(copied(input_ids=ids).logits, logits)
        assert not torch.allclose(module.model(input_ids=ids).logits, logits)


@pytest.mark.slow
def test_sliding_windows_sinks_and_experts_are_in_the_graph(tmp_path: Path) -> None:
    """One graph for all four layers; two where they are of two kinds: with a sliding window, and with experts."""
    rows = rows_of(ROWS[::2])
    for architecture, graphs in (("mistral", 1), ("qwen3_moe", 1), ("gpt_oss", 2), ("deepseek_v3", 2)):
        folder = save_model(architecture, tmp_path / architecture)
        compiled = passes(folder, rows, lora=False, compile="eager")
        assert (compiled.graphs, compiled.breaks) == (graphs, 0), architecture
        assert_same(compiled, passes(folder, rows, lora=False))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("checkpointing", "said"),
    [(False, "is several graphs, not one"), (True, "is not compiled, as it is not one graph, which model.gradient_ch")],
)
def test_what_cannot_be_one_graph_is_said(
    checkpointing: bool, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """gemma2 attends sample by sample, by a function that torch.compile leaves out."""
    folder, rows = save_model("gemma2", tmp_path), rows_of()[:2]
    options = {"lora": False, "gradient_checkpointing": checkpointing}
    with caplog.at_level("INFO", "lightning.pytorch"):
        compiled = passes(folder, rows, **options, compile="eager")
    (line,) = [record.getMessage() for record in caplog.records if "model.compile" in record.getMessage()]
    assert line.startswith(f"model.compile: Gemma2DecoderLayer {said}")
    assert "torch.compiler.disable" in line
    assert_same(compiled, passes(folder, rows, **options))


@pytest.mark.slow
def test_rows_of_few_lengths_give_the_same_numbers_in_few_shapes(tiny_qwen2: str) -> None:
    """Of the shapes that CUDA graphs are recorded for: tokens, numbers of samples, and the longest of them."""
    rows = rows_of((*ROWS, (9, 9, 9, 9), (50, 13), (40, 2, 2), (1,) * 20))
    shapes: set[tuple[int, ...]] = set()
    numbers: list[Any] = []
    plain = passes(tiny_qwen2, rows)

    def backend(graph: torch.fx.GraphModule, _: object) -> Any:
        def run(*inputs: Any) -> Any:
            ends = [x.numel() for x in inputs if isinstance(x, torch.Tensor) and x.dtype == torch.int32]
            hidden = {x.shape[1] for x in inputs if isinstance(x, torch.Tensor) and x.ndim == 3}
            shapes.add((*hidden, *ends))
            numbers.extend(x for x in inputs if isinstance(x, float) or (isinstance(x, torch.Tensor) and not x.ndim))
            return graph(*inputs)

        return run

    torch._dynamo.register_backend(backend, name="counts_shapes")
    padded = passes(tiny_qwen2, rows, compile="counts_shapes", pad_rows_to=32, cuda_graphs=True)
    assert_same(padded, plain)
    assert not numbers  # a number in host memory, e.g. the scaling of LoRA, would be copied in each pass
    assert (padded.graphs, padded.breaks) == (2, 0)  # one sample and several are alike, for there is padding
    tokens = [sum(row["segment_lengths"]) for row in rows]
    computed = [-(-count // 32) * 32 for count in tokens]
    assert {shape[0] for shape in shapes} == set(computed) == {32, 64, 96}
    assert {shape[1] for shape in shapes} == {1 + LEAST_SAMPLES}
    assert padded.padding == pytest.approx(1 - sum(tokens) / sum(computed))


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_modes_that_record_graphs_of_single_layers_are_refused(mode: str, model_folder: str) -> None:
    with pytest.raises(RecipeError, match=f"compile={mode} records CUDA graphs layer by layer.* model.cuda_graphs to"):
        CausalLM(model_folder, compile=mode)
