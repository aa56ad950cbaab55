"""LoRA on fused experts computes what PEFT computes, under every strategy, and its merge loses no expert."""

import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from architectures import save_model
from compared_strategies import Record, assert_same, sgd
from conftest import make_rows
from lit_callbacks.distributed.gather import full_weights
from peft import LoraConfig
from ranks import LiveRanks

from lit_ft import CausalLM, TextDataModule
from lit_ft.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy

EXPERTS = {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
LORA = LoraConfig(r=4, lora_alpha=16, **EXPERTS)
ALL_SHARDED = {"stage": 3, "stage3_param_persistence_threshold": 0}  # by default, weights as small as these stay whole
MINUTE = timedelta(minutes=1)
STRATEGIES: dict[str, tuple[int, Any]] = {
    "ddp": (2, lambda: "ddp"),
    "fsdp": (2, FSDPStrategy),
    "zero2": (2, lambda: DeepSpeedStrategy(stage=2)),
    "zero3": (2, lambda: DeepSpeedStrategy(config={"zero_optimization": ALL_SHARDED})),
    "pipeline": (2, lambda: ModelParallelStrategy(pipeline_parallel_size=2, num_microbatches=2, timeout=MINUTE)),
    "context": (2, lambda: ModelParallelStrategy(context_parallel_size=2, timeout=MINUTE)),
    "experts": (2, lambda: ModelParallelStrategy(expert_parallel_size=2, timeout=MINUTE)),
    "experts, shared by two ranks": (4, lambda: ModelParallelStrategy(expert_parallel_size=2, timeout=MINUTE)),
}
IN_CONTEXT = ("context", "pipeline")


def fit(make_trainer: Any, folder: str, data: str, strategy: str | None, **options: Any) -> Any:
    """Losses and gradient norms of three steps over eight rows each, and the final weights."""
    os.environ |= {"PL_GLOBAL_SEED": "3", "DS_ACCELERATOR": "cpu"}
    world, make = (1, lambda: "auto") if strategy is None else STRATEGIES[strategy]
    replicas = 1 if strategy in IN_CONTEXT else world
    record = Record(None, None)
    trainer = make_trainer(
        max_steps=3,
        devices=world,
        strategy=make(),
        accumulate_grad_batches=4 // replicas,
        callbacks=[record],
        use_distributed_sampler=False,
    )
    module = CausalLM(folder, **{"peft": LORA, "optimizer": sgd, **options})
    trainer.fit(module, TextDataModule(data, micro_batch_size=2, max_length=96))
    gather = getattr(trainer.strategy, "full_weights", full_weights)
    return record.steps, gather(module, lambda _, p: p.requires_grad)


@pytest.fixture(scope="module")
def deepspeed_ranks() -> Iterator[LiveRanks]:
    ranks = LiveRanks(keep_process_group=True)
    yield ranks
    ranks.end()


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model("mixtral", tmp_path_factory.mktemp("models") / "mixtral")


@pytest.fixture(scope="module")
def kept() -> dict[str, Any]:
    return {}


@pytest.mark.processes
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strategies_compute_what_one_process_computes(
    make_trainer: Any,
    write_rows: Any,
    live_ranks: LiveRanks,
    deepspeed_ranks: LiveRanks,
    mixtral: str,
    kept: dict[str, Any],
    strategy: str,
) -> None:
    ranks = deepspeed_ranks if strategy.startswith("zero") else live_ranks
    data = write_rows(make_rows(22))
    if "one" not in kept:
        kept["one"] = fit(make_trainer, mixtral, data, None)
    wanted, weights = kept["one"]
    assert sum("experts" in name for name in weights) == 16  # A and B of two tensors in each of four layers
    for steps, found in ranks(STRATEGIES[strategy][0], fit, make_trainer, mixtral, data, strategy):
        is_whole = found.keys() == weights.keys()  # a pipeline's stages send theirs to rank 0
        assert_same(steps, found if is_whole else weights, wanted, weights, 1e-5, strategy)
