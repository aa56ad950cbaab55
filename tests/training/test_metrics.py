"""Means over tokens are exact to fp32, whatever the module is cast to and however many tokens there are."""

import csv
import json
import os
import warnings
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from architectures import save_model
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger
from peft import LoraConfig
from ranks import on_ranks
from shared_fixtures import make_rows
from torch import distributed, nn

from lit_ft import CausalLM, TextDataModule
from lit_ft.data.text.sources import Source
from lit_ft.packed_batch import TokenLoss
from lit_ft.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from lit_ft.training.loss.token_weights import DFT
from lit_ft.training.metrics import ExpertLoad, SourceMeans, StageMetrics, TokenMean, WeightedMetrics
from lit_ft.training.policy.metrics import PolicyMetrics
from lit_ft.tuning.targets.experts import expert_layers

CASTS: dict[str, Any] = {
    "to": lambda module: module.to(dtype=torch.bfloat16),
    "bfloat16": lambda module: module.bfloat16(),
    "half": lambda module: module.half(),
}


@pytest.mark.parametrize("cast", CASTS)
def test_a_cast_module_counts_as_before(cast: str) -> None:
    module = nn.ModuleDict({"mean": TokenMean(), "sources": SourceMeans(("a", "b"))})
    CASTS[cast](module)
    mean, sources = module["mean"], module["sources"]
    for _ in range(1000):
        mean.update(torch.tensor(2.5), 1)
        sources.update(torch.tensor([1.0, 3.0]), torch.tensor([0, 1]))
    assert mean.compute().dtype == torch.float32
    assert float(mean.compute()) == 2.5
    assert {name: float(value) for name, value in sources.compute().items()} == {"a": 1.0, "b": 3.0}
    mean.reset()
    mean.update(torch.tensor(2.5), 1000)
    mean.update(torch.tensor(2.5), 1)
    assert int(mean.tokens) == 1001


def test_counts_are_exact_where_fp32_is_not() -> None:
    mean = TokenMean()
    mean.update(torch.tensor(2.0**24), 2**24)
    for _ in range(4):
        mean.update(torch.tensor(1.0), 1)
    assert (float(mean.total), int(mean.tokens)) == (2**24 + 4, 2**24 + 4)


def test_metrics_follow_to_another_device() -> None:
    mean = TokenMean().to("meta")
    assert mean.total.device.type == mean.tokens.device.type == "meta"
    assert (mean.total.dtype, mean.tokens.dtype) == (torch.float64, torch.int64)


def test_what_a_window_says_is_what_the_device_would_be_asked() -> None:
    losses, sources = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([2, 0, 2])

    def logged(**batch: Any) -> dict[str, float]:
        metrics, found = StageMetrics(), {}
        row = {"targets": sources, "target_sources": sources, "source_names": ("a", "b", "c"), **batch}
        for _ in range(2):
            metrics.add(TokenLoss(losses.sum(), torch.tensor(1), losses), row)
        metrics.log(SimpleNamespace(log=lambda name, value, **_: found.update({name: float(value)})), "train")
        assert metrics.sources.tokens.tolist() == [0, 0, 0]
        return found

    asked = logged()
    assert {name: value for name, value in asked.items() if name.count("/") == 2} == {
        "train/loss/a": 2.0,
        "train/loss/c": 2.5,
    }
    assert logged(window_sources=(0, 2)) == asked


STRATEGIES: dict[str, tuple[int, Any]] = {
    "one process": (1, lambda: "auto"),
    "ddp": (2, lambda: "ddp"),
    "fsdp": (2, FSDPStrategy),
    "tp2": (2, lambda: ModelParallelStrategy(tensor_parallel_size=2)),
    "pp2": (2, lambda: ModelParallelStrategy(pipeline_parallel_size=2)),
    "cp2": (2, lambda: ModelParallelStrategy(context_parallel_size=2)),
    "zero2": (2, lambda: DeepSpeedStrategy(stage=2)),
    "zero3": (2, lambda: DeepSpeedStrategy(stage=3)),
}


def trained_and_validated(
    make_trainer: Any, model_folder: str, sources: list[Source], strategy: str, precision: str
) -> dict[str, float]:
    """What a validation logs, after a step that trained on several sources too."""
    os.environ |= {"PL_GLOBAL_SEED": "3", "DS_ACCELERATOR": "cpu"}
    world, make = STRATEGIES[strategy]
    module = CausalLM(model_folder, peft=LoraConfig(r=4, target_modules=["q_proj"]))
    data = TextDataModule(sources=sources, val_sources=sources, micro_batch_size=8)
    trainer = make_trainer(
        max_steps=1, devices=world, strategy=make(), precision=precision, use_distributed_sampler=False
    )
    trainer.fit(module, data)
    (logged,) = trainer.validate(module, data, verbose=False)
    counts = np.bincount(data.splits["val"].source, weights=data.splits["val"].supervised)
    return {
        **logged,
        "of sources": (counts[0] * logged["val/loss/one"] + counts[1] * logged["val/loss/two"]) / sum(counts),
    }


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[Source]:
    folder = tmp_path_factory.mktemp("sources")
    for seed, name in enumerate(("one", "two")):
        (folder / f"{name}.json").write_text(json.dumps(make_rows(160, seed), ensure_ascii=False), encoding="utf-8")
    return [Source(str(folder / f"{name}.json")) for name in ("one", "two")]


@pytest.mark.processes
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_half_precision_rounds_the_model_and_not_its_metrics(
    make_trainer: Any, model_folder: str, sources: list[Source], kept: dict[str, Any], strategy: str
) -> None:
    arguments = make_trainer, model_folder, sources
    if not kept:
        kept.update(trained_and_validated(*arguments, "one process", "32-true"))
    world, _ = STRATEGIES[strategy]
    for got in on_ranks(world, trained_and_validated, *arguments, strategy, "bf16-true", timeout=100):
        assert got.keys() == kept.keys() >= {"val/loss/one", "val/loss/two", "val/token_accuracy"}
        for name, value in got.items():
            assert value == pytest.approx(kept[name], rel=0.02, abs=0.01), name
        assert got["of sources"] == pytest.approx(got["val/loss"], rel=1e-6)


def test_a_source_without_tokens_in_a_step_is_not_logged_again(
    make_trainer: Any, model_folder: str, sources: list[Source], tmp_path: Path
) -> None:
    one = Source(sources[0].path, max_rows=1)
    data = TextDataModule(sources=[one, Source(sources[1].path, max_rows=3)], shuffle=False)
    trainer = make_trainer(max_epochs=2, log_every_n_steps=1, logger=CSVLogger(tmp_path))
    trainer.fit(CausalLM(model_folder, peft=LoraConfig(r=4, target_modules=["q_proj"])), data)
    with (Path(trainer.logger.log_dir) / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["train/loss"]]
    assert [[bool(row[f"train/loss/{name}"]) for row in rows] for name in ("one", "two")] == [
        2 * [True, False, False, False],
        2 * [False, True, True, True],
    ]


# --- collectives ---------------------------------------------------------------------------------------


def counted_gathers(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """Dtypes of the tensors that are gathered from now on."""
    dtypes: list[torch.dtype] = []
    plain = distributed.all_gather

    def counted(parts: list[torch.Tensor], tensor: torch.Tensor, **options: Any) -> Any:
        dtypes.append(tensor.dtype)
        return plain(parts, tensor, **options)

    monkeypatch.setattr(distributed, "all_gather", counted)
    return dtypes


def metrics_of_rank(rank: int) -> dict[str, StageMetrics]:
    """Metrics of which each rank has other sums, and rank 1 no tokens of a ``CausalLM``."""
    draw = torch.Generator().manual_seed(rank)
    losses, sources = torch.rand(5, generator=draw), torch.tensor([0, 2, 2, 0, 0])
    if rank == 1:
        losses, sources = losses[:0], sources[:0]
    batch = {"targets": sources, "target_sources": sources, "source_names": ("a", "b", "c"), "window_sources": (0, 2)}
    stages = {"causal": WeightedMetrics(DFT(), True), "policy": PolicyMetrics(["X"], has_router_loss=True, has_kl=True)}
    for name, metrics in stages.items():
        metrics.sources = SourceMeans(batch["source_names"])
        for metric in metrics.children():
            if (name, rank) != ("causal", 1) and isinstance(metric, TokenMean) and not isinstance(metric, SourceMeans):
                metric.update(torch.rand(metric.total.shape, generator=draw), 7 - 4 * rank)
    stages["causal"].add(TokenLoss(losses.sum(), torch.tensor(1 - rank), losses), batch)
    return stages


def logged_by_ranks() -> dict[str, tuple[list[torch.dtype], dict[str, torch.Tensor], dict[str, torch.Tensor]]]:
    """Dtypes of what is gathered for a log, what is logged, and what each metric alone computes."""
    distributed.init_process_group("gloo")
    found = {}
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # metrics of rank 1 are computed without a value
        dtypes = counted_gathers(patch)
        for name, metrics in metrics_of_rank(distributed.get_rank()).items():
            alone = {}
            for part, metric in deepcopy(metrics).named_children():
                alone[part] = metric.compute()
            dtypes.clear()
            logged: dict[str, torch.Tensor] = {}
            metrics.log(SimpleNamespace(log=lambda name, value, to=logged, **_: to.update({name: value})), "train")
            found[name] = list(dtypes), logged, alone
            assert all(not state.any() for metric in metrics.children() for state in metric.states())
    distributed.destroy_process_group()
    return found


@pytest.mark.processes
def test_all_states_of_a_stage_are_gathered_together() -> None:
    one, other = on_ranks(2, logged_by_ranks)
    for name, (dtypes, logged, alone) in one.items():
        assert dtypes == other[name][0] == [torch.float64, torch.int64]
        assert logged.keys() == other[name][1].keys()
        assert all(torch.equal(value, other[name][1][key]) for key, value in logged.items())
        assert torch.equal(logged["train/loss"], alone["loss"])
        assert torch.equal(logged["train/router_aux_loss"], alone["router_aux_loss"])
    causal, policy = one["causal"], one["policy"]
    assert {key: causal[1][f"train/loss/{key}"] for key in "ac"} == {key: causal[2]["sources"][key] for key in "ac"}
    assert torch.equal(causal[1]["train/token_accuracy"], causal[2]["token_accuracy"])
    assert [policy[1][f"train/{key}"] for key in ("reward", "answer_tokens", "cut_share", "rewards/X")] == [
        *policy[2]["of_answers"]
    ]
    assert torch.equal(policy[1]["train/kl"], policy[2]["kl"])


def gathers_of_a_fit(make_trainer: Any, model_folder: str, data: str) -> tuple[int, int]:
    """Optimizer steps of a fit and a validation, and tensors that are gathered in them."""
    with pytest.MonkeyPatch.context() as patch:
        dtypes = counted_gathers(patch)
        trainer = make_trainer(max_steps=3, devices=2, strategy="ddp", use_distributed_sampler=False)
        trainer.fit(CausalLM(model_folder), TextDataModule(data, micro_batch_size=2, val_path=data))
        return trainer.global_step, len(dtypes)


@pytest.mark.processes
def test_a_step_gathers_one_tensor_of_each_dtype(make_trainer: Any, model_folder: str, write_rows: Any) -> None:
    found = on_ranks(2, gathers_of_a_fit, make_trainer, model_folder, write_rows(make_rows(12)), timeout=100)
    assert found == [(3, 2 * (3 + 1))] * 2


# --- load of experts -----------------------------------------------------------------------------------

LOAD = "train/expert_load_max_over_mean"


class Loads(Callback):
    """Logged loads of each step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if not trainer.fit_loop._should_accumulate():
            metrics = trainer.callback_metrics
            self.steps.append({name: float(value) for name, value in metrics.items() if name.startswith(LOAD)})


def fitted_loads(
    make_trainer: Any, folder: str, data: str, devices: int = 1, strategy: Any = "auto", **options: Any
) -> Any:
    os.environ["PL_GLOBAL_SEED"] = "3"
    loads = Loads()
    trainer = make_trainer(
        max_steps=2,
        devices=devices,
        strategy=strategy() if callable(strategy) else strategy,
        callbacks=[loads],
        accumulate_grad_batches=2 // devices,
        use_distributed_sampler=False,
    )
    trainer.fit(CausalLM(folder, **options), TextDataModule(data, micro_batch_size=2, val_path=data))
    return loads.steps


@pytest.mark.processes
def test_one_process_and_ranks_log_the_same(make_trainer: Any, write_rows: Any, tmp_path: Path) -> None:
    folder, data = save_model("mixtral", tmp_path / "model"), write_rows(make_rows(8))
    one = fitted_loads(make_trainer, folder, data)
    layers = [one[1][f"{LOAD}/layer_{place}"] for place in range(4)]
    assert len(one) == 2
    assert all(1 < load <= 2 for load in layers)  # of 4 experts, each token has 2
    assert one[1][LOAD] == max(layers)
    assert fitted_loads(make_trainer, folder, data, gradient_checkpointing=True) == [
        pytest.approx(step, rel=1e-6) for step in one
    ]
    for strategy in ("ddp", lambda: ModelParallelStrategy(expert_parallel_size=2)):
        for found in on_ranks(2, fitted_loads, make_trainer, folder, data, 2, strategy, timeout=100):
            assert found[0] == pytest.approx(one[0])


def test_the_busiest_expert_over_the_mean() -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = torch.nn.Module()
            self.experts.weight = torch.nn.Parameter(torch.zeros(4, 2, 3))

    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([Layer(), Layer()])})
    alone = ExpertLoad(expert_layers(model)[:1])
    alone.update(0, torch.tensor([[0, 1], [0, 2]]))
    assert alone.compute() == {"layer_0": 2 / (4 / 4)}
    load = ExpertLoad(expert_layers(model))
    load.update(0, torch.tensor([[0, 1], [0, 2]]))
    load.update(1, torch.tensor([[0, 1], [2, 3]]))
    load.update(0, torch.tensor([[0, 3]]))
    assert load.compute() == {"layer_0": 3 / (6 / 4), "layer_1": 1.0}
