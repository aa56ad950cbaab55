"""Layers as CUDA graphs. A CPU has none: there operators are recorded and repeated, each from the same tensors."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from architectures import save_model
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, Strategy
from one_process import Numbers, numbers
from peft import LoraConfig, PromptTuningConfig
from ranks import on_ranks
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel
from tuning_methods import METHODS

from lit_ft import CausalLM, RecipeError, TextDataModule
from lit_ft.packed_batch import PackedBatch, pack_samples
from lit_ft.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from lit_ft.training.loss import cuda_graphs

ROWS = ((7, 20), (5, 6, 12), (30,), (9, 9, 9), (40, 3), (2, 3, 4))
"""Lengths of the samples of each row; with a multiple of 32 they are two shapes."""


class Operators(TorchDispatchMode):
    """Context manager that records the operators that run, as a graph on CUDA does, and repeats them in place."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result

    def repeat(self) -> None:
        for func, args, kwargs, result in self.calls:
            again = func(*args, **kwargs)
            for kept, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(kept, Tensor) and kept.data_ptr() != new.data_ptr():
                    kept.copy_(new)


def record_operators(compute: Callable[[], Any], _: object) -> tuple[Any, Callable[[], None]]:
    with Operators() as operators:
        result = compute()

    def replay() -> None:
        with torch.no_grad():
            operators.repeat()

    return result, replay


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Passes that were recorded."""
    made: list[object] = []

    def record(compute: Callable[[], Any], pool: object) -> tuple[Any, Callable[[], None]]:
        made.append(compute)
        return record_operators(compute, pool)

    monkeypatch.setattr(cuda_graphs, "record", record)
    monkeypatch.setattr(cuda_graphs, "can_record", lambda _: True)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    return made


GRAPHS: dict[str, Any] = {"cuda_graphs": True, "pad_rows_to": 32}


def rows_of(lengths: tuple[tuple[int, ...], ...] = ROWS) -> list[PackedBatch]:
    draw = np.random.default_rng(0)
    return [pack_samples([(ids, ids) for ids in (draw.integers(3, 300, n) for n in row)]) for row in lengths]


def module_of(folder: str, **options: Any) -> CausalLM:
    torch.manual_seed(0)
    module = CausalLM(folder, **options)
    module.configure_model()
    return module.train()


def base_of(module: CausalLM) -> PreTrainedModel:
    assert isinstance(module.model, PreTrainedModel)
    return module.model


def lora() -> LoraConfig:
    return LoraConfig(
        r=4, target_modules=["q_proj", "k_proj", "up_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )


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


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("with_lora", [True, False])
def test_replayed_passes_give_the_same_numbers(
    with_lora: bool, accumulate: int, tiny_qwen2: str, recordings: list[object]
) -> None:
    peft = lora() if with_lora else None
    plain = module_of(tiny_qwen2, peft=peft)
    recorded = module_of(tiny_qwen2, peft=peft, **GRAPHS)
    wanted, found = passes(plain, rows_of(), accumulate), passes(recorded, rows_of(), accumulate)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * float(other.abs().max()))
    assert len(recordings) == 2  # rows of 32 tokens came five times, a row of 64 once


@pytest.mark.slow
def test_long_samples_of_one_length_are_recorded_without_boundaries(tiny_qwen2: str, recordings: list[object]) -> None:
    """Attention is SDPA then, which has a faster kernel on some devices."""
    rows = rows_of(((512, 512), (512, 512), (1024,), (512, 512), (1024,), (1024,)))
    long = partial(module_of, tiny_qwen2, peft=lora(), config_overrides={"max_position_embeddings": 1024})
    plain, recorded = long(), long(**GRAPHS)
    for one, other in zip(passes(recorded, rows), passes(plain, rows), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * float(other.abs().max()))
    assert len(recordings) == 4
    graphs = recorded._packed.graphs
    assert graphs is not None
    assert set(graphs._recorded) == {(1024, None, 512), (1024, None, 1024)}


ELSEWHERE = (
    {"CorDA", "LoRA-GA", "EVA"}  # read training data, and are LoRA then
    | {"prompt tuning", "P-tuning", "prefix tuning"}  # refused
    | {"VB-LoRA"}  # refused, see below
    | {"PVeRA"}  # draws numbers for padding too
    | {
        "LoHa",
        "LoKr",
        "SHiRA",
    }  # read a scalar of the host's memory, or sparse tensors, which cannot be told apart here
)


@pytest.mark.slow
@pytest.mark.parametrize("method", [name for name in METHODS if name not in ELSEWHERE])
def test_each_tuning_method_is_recorded_with_weights_that_change(
    method: str, tiny_qwen2: str, recordings: list[object]
) -> None:
    """What a method keeps from the weights of a step, in a cache of the host's, would be that of the recorded one."""

    def stepped(**options: Any) -> list[Tensor]:
        module, draw, found = module_of(tiny_qwen2, peft=METHODS[method], **options), torch.Generator(), []
        for row in rows_of(((7, 20), (5, 6, 12), (9, 9, 9))):
            with torch.no_grad():
                for weight in module.trainable_parameters().values():
                    weight.add_(0.02 * torch.randn(weight.shape, generator=draw))
            found += passes(module, [row])
        return found

    for one, other in zip(stepped(**GRAPHS), stepped(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6 * float(other.abs().max()))
    assert len(recordings) == 2


def test_what_reads_values_on_the_host_is_refused(tiny_qwen2: str, recordings: list[object]) -> None:
    """VB-LoRA looks into its weights in each forward pass."""
    module = module_of(tiny_qwen2, peft=METHODS["VB-LoRA"], **GRAPHS)
    with pytest.raises(RecipeError, match=r"do what a CUDA graph cannot repeat \(operation not permitted .* to false"):
        passes(module, rows_of(((7, 20),) * 2))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["gpt_oss", "qwen3_moe", "deepseek_v3"])
def test_sinks_experts_and_latent_attention_are_recorded(
    architecture: str, tmp_path: Path, recordings: list[object]
) -> None:
    folder, rows = save_model(architecture, tmp_path), rows_of(((7, 20), (5, 6, 12), (9, 9, 9)))
    found = passes(module_of(folder, **GRAPHS), rows)
    for one, other in zip(found, passes(module_of(folder), rows), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * float(other.abs().max()))
    assert len(recordings) == 2


def test_weights_that_begin_to_train_are_recorded_anew(tiny_qwen2: str, recordings: list[object]) -> None:
    plain, recorded = module_of(tiny_qwen2), module_of(tiny_qwen2, **GRAPHS)
    rows = rows_of(((7, 20),) * 3)
    for is_trained in (False, True):
        for module in (plain, recorded):
            base_of(module).get_input_embeddings().requires_grad_(is_trained)
        for one, other in zip(passes(recorded, rows), passes(plain, rows), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * float(other.abs().max()))
    assert len(recordings) == 4


def test_weights_that_move_are_recorded_anew(tiny_qwen2: str, recordings: list[object]) -> None:
    plain, recorded = module_of(tiny_qwen2), module_of(tiny_qwen2, **GRAPHS)
    rows = rows_of(((7, 20),) * 3)
    for _ in range(2):
        for module in (plain, recorded):
            weight = base_of(module).get_input_embeddings().weight
            weight.data = 2 * weight.data
        for one, other in zip(passes(recorded, rows), passes(plain, rows), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * float(other.abs().max()))
    assert len(recordings) == 4


def test_a_backward_pass_whose_activations_are_gone_is_refused(tiny_qwen2: str, recordings: list[object]) -> None:
    module, (row,) = module_of(tiny_qwen2, **GRAPHS), rows_of(((7, 20),))
    passes(module, [row, row])
    first, second = module.hidden_states(row).sum(), module.hidden_states(row).sum()
    second.backward(retain_graph=True)
    for late in (first, second):
        with pytest.raises(RecipeError, match="memory of this batch's activations was taken by a later pass"):
            late.backward()


def test_a_fit_replays_its_steps(
    make_trainer: Any, model_folder: str, write_rows: Any, recordings: list[object]
) -> None:
    plain = numbers(make_trainer, model_folder, write_rows(), peft=lora())
    replayed = numbers(make_trainer, model_folder, write_rows(), peft=lora(), cuda_graphs=True, pad_rows_to=512)
    assert plain.padding is None
    assert replayed.padding is not None
    assert 0 < replayed.padding < 1
    assert replayed.losses == pytest.approx(plain.losses, rel=1e-6)
    for ours, wanted in zip(replayed.gradients, plain.gradients, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-6)
    assert len(recordings) == 2


def under_ddp(folder: str, rows: str, options: dict[str, Any]) -> tuple[list[float], list[Tensor]]:
    """Losses and gradients of a fit of two ranks."""
    found, is_recorded = Numbers(), bool(options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_graphs, "record", record_operators)
        patch.setattr(cuda_graphs, "can_record", lambda _: is_recorded)
        patch.setattr(torch.cuda, "graph_pool_handle", object)
        trainer = Trainer(
            accelerator="cpu",
            devices=2,
            strategy="ddp",
            max_steps=3,
            accumulate_grad_batches=2,
            callbacks=[found],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
        )
        module = CausalLM(folder, peft=lora(), **options)
        trainer.fit(module, TextDataModule(rows, micro_batch_size=2, shuffle=False))
    assert module._packed.graphs is None or module._packed.graphs.passes >= 4
    return found.losses, found.gradients


@pytest.mark.processes
@pytest.mark.slow
def test_ranks_of_ddp_reduce_the_gradients_of_replays(model_folder: str, write_rows: Any) -> None:
    rows = write_rows()
    padded = {**GRAPHS, "pad_rows_to": 256}
    plain, replayed = (on_ranks(2, under_ddp, model_folder, rows, options) for options in ({}, padded))
    for ours, wanted in zip(replayed, plain, strict=True):
        assert ours[0] == pytest.approx(wanted[0], rel=1e-6)
        for one, other in zip(ours[1], wanted[1], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_validation_is_not_recorded(tiny_qwen2: str, recordings: list[object]) -> None:
    module = module_of(tiny_qwen2, **GRAPHS).eval()
    with torch.no_grad():
        losses = [float(module(row).loss_sum) for row in rows_of(((7, 20),) * 3)]
    assert all(loss > 0 for loss in losses)
    assert not recordings


@pytest.mark.parametrize("architecture", ["qwen3_5_text", "qwen2"])
def test_parts_that_are_computed_sample_by_sample_are_refused(
    architecture: str, tmp_path: Path, recordings: list[object]
) -> None:
    options = {**GRAPHS}
    if architecture == "qwen2":  # frequencies that depend on the length of a sample
        options["config_overrides"] = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}
    module = module_of(save_model(architecture, tmp_path), **options)
    said = "sample by sample.* would repeat the samples of one batch; set model.cuda_graphs to false"
    with pytest.raises(RecipeError, match=said):
        passes(module, rows_of(((7, 20),) * 2))


def test_shapes_that_are_many_are_said(
    tiny_qwen2: str, recordings: list[object], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cuda_graphs, "MANY_SHAPES", 2)
    module = module_of(tiny_qwen2, cuda_graphs=True, pad_rows_to=8)
    with pytest.warns(UserWarning, match="2 shapes of packed batches are recorded, which costs time and memory"):
        passes(module, rows_of(((8,), (16,)) * 2))


@pytest.mark.parametrize("strategy", [DeepSpeedStrategy(), FSDPStrategy(), ModelParallelStrategy()])
def test_strategies_that_move_weights_are_refused(strategy: Strategy) -> None:
    with pytest.raises(
        RecipeError, match=f"{type(strategy).__name__}: graphs are recorded for weights that keep their"
    ):
        cuda_graphs.check_strategy(strategy)
    cuda_graphs.check_strategy(DDPStrategy())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"cuda_graphs": True}, "each number of tokens in a packed batch; set model.pad_rows_to, e.g. to 256"),
        ({"pad_rows_to": 256}, "pad_rows_to=256 only costs time .* set model.cuda_graphs to true"),
        ({"cuda_graphs": True, "pad_rows_to": 0}, "pad_rows_to=0 must be a number of tokens"),
        ({"neftune_alpha": 5.0}, "cuda_graphs with model.neftune_alpha=5.0"),
        ({"gradient_checkpointing": True}, "cuda_graphs with model.gradient_checkpointing=True"),
        (
            {"peft": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)},
            "PromptTuningConfig, which adds virtual tokens",
        ),
    ],
)
def test_options_that_do_not_go_with_graphs_are_refused(options: dict[str, Any], said: str, model_folder: str) -> None:
    with pytest.raises(RecipeError, match=said):
        CausalLM(model_folder, **({} if GRAPHS.keys() & options.keys() else GRAPHS), **options)


def test_other_attention_is_refused(tmp_path: Path, model_folder: str) -> None:
    with pytest.raises(RecipeError, match="attention by sdpa: graphs are recorded of packed attention alone"):
        CausalLM(model_folder, attn_implementation="sdpa", **GRAPHS)
    with pytest.raises(RecipeError, match="attention by eager: graphs are recorded of packed attention alone"):
        module_of(save_model("gemma2", tmp_path), **GRAPHS)


def test_a_device_without_graphs_computes_as_ever(tiny_qwen2: str, caplog: pytest.LogCaptureFixture) -> None:
    module = module_of(tiny_qwen2, **GRAPHS)
    with caplog.at_level("INFO", "lightning.pytorch"):
        found = passes(module, rows_of(((7, 20),) * 2))
    assert "nothing to record on this device (cpu)" in caplog.text
    wanted = passes(module_of(tiny_qwen2), rows_of(((7, 20),) * 2))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
