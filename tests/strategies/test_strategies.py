"""Every strategy computes what one process computes."""

import os
import resource
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from compared_strategies import Record, adamw, assert_same, load_whole, sgd
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import LambdaCallback
from lit_callbacks import AdapterMerger
from lit_callbacks.distributed.gather import full_weights
from lit_callbacks.output.step_lines import read_lines
from lit_callbacks.report.report_data import VALIDATION_ANSWERS
from peft import LoraConfig, get_peft_model
from ranks import LiveRanks
from shared_fixtures import make_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from benchmarks.tiny_configs import tiny_config
from lit_ft import AnswerScores, CausalLM, RecipeError, TextDataModule
from lit_ft.checkpointing.storage.checkpoint_io import AnyCheckpointIO
from lit_ft.internals.torch import SHARDS_INTEGERS
from lit_ft.strategies import FSDPStrategy, ModelParallelStrategy
from lit_ft.strategies.sharded import check_shared
from lit_ft.training.optimizers import compatibility

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("strategies")]  # its tests share ranks and fits

STRATEGIES: dict[str, tuple[int, Any]] = {
    "ddp": (2, lambda: "ddp"),
    "fsdp": (2, FSDPStrategy),
    "fsdp-gathered_once": (2, lambda: FSDPStrategy(reshard_after_forward=False)),
    "fsdp-synced": (2, lambda: FSDPStrategy(sync_each_micro_batch=True)),
    "fsdp-offloaded": (2, lambda: FSDPStrategy(cpu_offload=True)),
    "fsdp-hybrid": (4, lambda: FSDPStrategy(shard_size=2)),
}
LORA = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")


def fit(
    make_trainer: Any, model_folder: str, data: str, how: dict[str, Any], strategy: str = "one_process"
) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    """Losses, norms and final weights of two epochs: 13 rows in steps of 8, the second of an epoch short.

    With ``validates``, a validation of 5 rows follows each epoch.
    """
    os.environ["PL_GLOBAL_SEED"] = "3"
    world, make = STRATEGIES.get(strategy, (1, lambda: "auto"))
    module = CausalLM(model_folder, **how.get("model", {"peft": LORA}), optimizer=how.get("optimizer", sgd))
    record = Record(how.get("save_after"), how.get("save"))
    trainer = make_trainer(
        max_epochs=how.get("epochs", 2),
        devices=world,
        strategy=make(),
        accumulate_grad_batches=4 // world if world < 4 else 1,
        gradient_clip_val=1.0,
        log_every_n_steps=1,
        callbacks=[record],
        precision=how.get("precision", "32-true"),
        use_distributed_sampler=False,
        plugins=[AnyCheckpointIO()],
    )
    val_path = str(Path(data).with_name("val.json")) if how.get("validates") else None
    rows = TextDataModule(data, micro_batch_size=2, max_length=96, val_path=val_path)
    trainer.fit(module, rows, ckpt_path=how.get("resume"))
    if "save" in how and "save_after" not in how:
        trainer.save_checkpoint(how["save"])
    return record.steps, full_weights(module, lambda _, p: p.requires_grad)


WAYS: dict[str, dict[str, Any]] = {
    "LoRA": {"model": {"peft": LORA}},
    "full": {"model": {"gradient_checkpointing": True}},
}


@pytest.fixture
def one_process(make_trainer: Any, model_folder: str, rows: str, kept: dict[str, Any]) -> Callable[..., Any]:
    """``fit`` on one process, once for each way and model folder."""

    def fit_once(how: dict[str, Any], folder: str = model_folder) -> Any:
        if (key := f"{folder} {how}") not in kept:
            kept[key] = fit(make_trainer, folder, rows, how)
        return kept[key]

    return fit_once


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_same_numbers(
    make_trainer: Any,
    model_folder: str,
    rows: str,
    one_process: Callable[..., Any],
    live_ranks: LiveRanks,
    strategy: str,
    way: str,
) -> None:
    one, weights = one_process(WAYS[way])
    how = {**WAYS[way], "validates": True}
    for steps, found in live_ranks(
        STRATEGIES[strategy][0], fit, make_trainer, model_folder, rows, how, strategy, timeout=100
    ):
        assert len(steps) == 4
        assert_same(steps, found, one, weights, 1e-5)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Function that gives the folder of a tiny model, by its architecture."""

    @cache
    def save(architecture: str) -> str:
        folder = tmp_path_factory.mktemp("models") / architecture
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(tiny_config(architecture), dtype=torch.float32).save_pretrained(folder)
        make_tokenizer().save_pretrained(folder)
        return str(folder)

    return save


@pytest.mark.parametrize(
    ("architecture", "way"),
    [
        *[("qwen3_5_text", "LoRA"), ("qwen3_5_text", "full"), ("deepseek_v32", "full"), ("mamba", "LoRA")],
        ("deepseek_v4", "full"),
    ],
)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_layers_that_run_sample_by_sample_compute_the_same(
    make_trainer: Any,
    folder_of: Callable[[str], str],
    rows: str,
    one_process: Callable[..., Any],
    live_ranks: LiveRanks,
    strategy: str,
    architecture: str,
    way: str,
) -> None:
    """Ranks have different numbers of samples in a packed batch, and compute each sample for itself.

    Qwen3.5 has three gated delta nets and an attention layer; DeepSeek-V3.2 has indexers, which get no gradient; Mamba
    lists its mixers beside its layers, in which they are. DeepSeek-V4 has compressors, which these samples are too
    short for.
    """
    how, folder = {**WAYS[way], "epochs": 1}, folder_of(architecture)
    one, weights = one_process(how, folder)
    assert not any("indexer" in name for name in weights)
    for steps, found in live_ranks(2, fit, make_trainer, folder, rows, how, strategy, timeout=140):
        assert_same(steps, found, one, weights, 1e-5)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_new_weights_are_drawn_as_on_one_process(
    make_trainer: Any,
    model_folder: str,
    rows: str,
    one_process: Callable[..., Any],
    live_ranks: LiveRanks,
    strategy: str,
) -> None:
    how = {"model": {"init": "random"}}
    one, weights = one_process(how)
    for steps, found in live_ranks(2, fit, make_trainer, model_folder, rows, how, strategy):
        assert_same(steps, found, one, weights, 1e-5)


PRECISIONS: dict[str, dict[str, Any]] = {
    "bf16-mixed, LoRA": {"precision": "bf16-mixed", "model": {"peft": LORA}},
    "bf16-mixed, full": {"precision": "bf16-mixed", "model": {}},
    "bf16-true, LoRA": {"precision": "bf16-true", "model": {"peft": LORA}},
    "bf16-true, full": {"precision": "bf16-true", "model": {}},
    "bf16 base, LoRA": {"model": {"peft": LORA, "dtype": "bfloat16"}},
    "bf16 base and LoRA": {"model": {"peft": LORA, "dtype": "bfloat16", "adapter_dtype": "auto"}},
}


@pytest.mark.parametrize("way", PRECISIONS)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_precisions(
    make_trainer: Any,
    model_folder: str,
    rows: str,
    one_process: Callable[..., Any],
    live_ranks: LiveRanks,
    strategy: str,
    way: str,
) -> None:
    how = PRECISIONS[way]
    one, _ = one_process(how)
    for steps, _ in live_ranks(2, fit, make_trainer, model_folder, rows, how, strategy):
        # bf16 rounds to 2^-9 of a value; how it adds up depends on how a step is split.
        for got, wanted in zip(steps, one, strict=True):
            assert got == pytest.approx(wanted, rel=2e-2)


CASTS_LATE: dict[str, Any] = {
    "fsdp": FSDPStrategy,
    "tp2": lambda: ModelParallelStrategy(tensor_parallel_size=2),
    "pp2": lambda: ModelParallelStrategy(pipeline_parallel_size=2),
}


class AtStart(Callback):
    """The weights that train, before the first step, of this rank's layers."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        found = full_weights(pl_module, lambda _, p: p.requires_grad)
        self.weights = {name: tensor.clone() for name, tensor in found.items()}


def adapter_at_start(
    make_trainer: Any, folder: str, data: str, peft: LoraConfig | str, strategy: str | None = None
) -> dict[str, torch.Tensor]:
    os.environ["PL_GLOBAL_SEED"] = "3"
    how: Any = {} if strategy is None else {"strategy": CASTS_LATE[strategy](), "devices": 2}
    start = AtStart()
    trainer = make_trainer(max_steps=1, callbacks=[start], use_distributed_sampler=False, **how)
    adapter: Any = {"adapter": peft} if isinstance(peft, str) else {"peft": peft}
    module = CausalLM(folder, dtype="float32", **adapter, optimizer=sgd)
    trainer.fit(module, TextDataModule(data, micro_batch_size=2))
    return start.weights


@pytest.mark.parametrize("init", [True, "pissa"])
@pytest.mark.parametrize("strategy", CASTS_LATE)
def test_an_adapter_starts_as_on_one_process_where_the_base_is_cast_later(
    make_trainer: Any,
    model_folder: str,
    write_rows: Any,
    live_ranks: LiveRanks,
    tmp_path: Path,
    strategy: str,
    init: Any,
) -> None:
    AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.bfloat16).save_pretrained(tmp_path / "base")
    AutoTokenizer.from_pretrained(model_folder).save_pretrained(tmp_path / "base")
    peft = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=init)
    arguments = make_trainer, str(tmp_path / "base"), write_rows(), peft
    one = adapter_at_start(*arguments)
    ranks = live_ranks(2, adapter_at_start, *arguments, strategy)
    assert one.keys() == {name for found in ranks for name in found}
    for found in ranks:
        for name, tensor in found.items():
            assert torch.equal(tensor, one[name]), name


@pytest.mark.parametrize("strategy", CASTS_LATE)
def test_a_given_adapter_starts_as_in_its_files(
    make_trainer: Any, model_folder: str, write_rows: Any, live_ranks: LiveRanks, tmp_path: Path, strategy: str
) -> None:
    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.bfloat16)
    base.save_pretrained(tmp_path / "base")
    AutoTokenizer.from_pretrained(model_folder).save_pretrained(tmp_path / "base")
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    theirs = get_peft_model(base, config)
    theirs.save_pretrained(str(tmp_path / "theirs"))
    saved = {f"model.{name}": p for name, p in theirs.named_parameters() if p.requires_grad}
    ranks = live_ranks(
        2, adapter_at_start, make_trainer, str(tmp_path / "base"), write_rows(), str(tmp_path / "theirs"), strategy
    )
    assert saved.keys() == {name for found in ranks for name in found}
    for found in ranks:
        for name, tensor in found.items():
            assert torch.equal(tensor, saved[name]), name


MOVES = [
    ("fsdp", "fsdp"),
    ("fsdp", "one_process"),
    ("one_process", "fsdp"),
    ("fsdp", "ddp"),
    ("ddp", "fsdp"),
    ("fsdp", "fsdp-hybrid"),
    ("fsdp-hybrid", "fsdp-offloaded"),
]


def stop_and_resume(
    live_ranks: LiveRanks,
    common: tuple[Any, ...],
    how: dict[str, Any],
    stopped: dict[str, Any],
    before: str,
    after: str,
) -> list[Any]:
    """A fit that stops and saves under one strategy and goes on under another; what each rank of the second found."""
    live_ranks(STRATEGIES.get(before, (1,))[0], fit, *common, {**how, **stopped}, before)
    rest = {**how, "resume": stopped["save"]}
    return live_ranks(STRATEGIES.get(after, (1,))[0], fit, *common, rest, after, timeout=100)


@pytest.mark.parametrize(
    ("before", "after", "way"),
    [(*move, way) for move in MOVES for way in ("full", "LoRA")],
)
def test_a_run_goes_on_under_another_strategy(
    make_trainer: Any,
    model_folder: str,
    rows: str,
    one_process: Callable[..., Any],
    live_ranks: LiveRanks,
    tmp_path: Path,
    before: str,
    after: str,
    way: str,
) -> None:
    how, saved = {**WAYS[way], "optimizer": adamw}, tmp_path / "saved.ckpt"
    whole, weights = one_process(how)
    stopped = {"epochs": 1, "save": str(saved)}
    ranks = stop_and_resume(live_ranks, (make_trainer, model_folder, rows), how, stopped, before, after)
    assert saved.is_dir() == (way == "full" and before.startswith("fsdp"))
    for steps, found in ranks:
        assert len(steps) == 2
        assert_same(steps, found, whole[2:], weights, 1e-4)


def slower(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=2e-3, eps=1e-4, weight_decay=0.1)


@pytest.mark.parametrize("way", WAYS)
def test_a_run_goes_on_with_another_learning_rate(
    make_trainer: Any, model_folder: str, rows: str, live_ranks: LiveRanks, tmp_path: Path, way: str
) -> None:
    common, how = (make_trainer, model_folder, rows), {**WAYS[way], "optimizer": adamw, "epochs": 1}
    fit(*common, {**how, "save": str(tmp_path / "one.ckpt")})
    rest = {**WAYS[way], "optimizer": slower}
    one, weights = fit(*common, {**rest, "resume": str(tmp_path / "one.ckpt")})
    _, as_before = fit(*common, {**rest, "optimizer": adamw, "resume": str(tmp_path / "one.ckpt")})
    assert any((weights[name] - as_before[name]).abs().max() > 1e-3 for name in weights)
    saved = str(tmp_path / "two.ckpt")
    live_ranks(2, fit, *common, {**how, "save": saved}, "fsdp")
    for steps, found in live_ranks(2, fit, *common, {**rest, "resume": saved}, "fsdp"):
        assert_same(steps, found, one, weights, 1e-4)


@pytest.mark.parametrize(("before", "after"), [("ddp", "one_process"), ("one_process", "fsdp-hybrid")])
def test_a_run_goes_on_in_the_middle_of_an_epoch(
    make_trainer: Any,
    model_folder: str,
    write_rows: Any,
    live_ranks: LiveRanks,
    tmp_path: Path,
    before: str,
    after: str,
) -> None:
    data, how = write_rows(count=37), {**WAYS["LoRA"], "optimizer": adamw, "epochs": 1}
    whole, weights = fit(make_trainer, model_folder, data, how)
    stopped = {"save_after": 2, "save": str(tmp_path / "saved.ckpt")}
    for steps, found in stop_and_resume(live_ranks, (make_trainer, model_folder, data), how, stopped, before, after):
        assert len(steps) == 3
        assert_same(steps, found, whole[2:], weights, 1e-4)


def test_a_place_within_the_new_steps_is_refused(
    make_trainer: Any, model_folder: str, write_rows: Any, tmp_path: Path
) -> None:
    data, saved = write_rows(count=37), str(tmp_path / "saved.ckpt")
    fit(make_trainer, model_folder, data, {**WAYS["LoRA"], "epochs": 1, "save_after": 1, "save": saved})
    trainer = make_trainer(max_epochs=2, accumulate_grad_batches=3)
    module = CausalLM(model_folder, peft=LORA, optimizer=sgd)
    with pytest.raises(RecipeError, match="8 samples into its epoch, .* = 6 does not end a step there"):
        trainer.fit(module, TextDataModule(data, micro_batch_size=2, max_length=96), ckpt_path=saved)


def fail_together(folder: str, trainer: Any, module: CausalLM) -> None:
    """A rank that cannot write its part is told on all ranks, and none waits for it."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if trainer.global_rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match=f"File too large: '{folder}'"):
            AdapterMerger(Path(folder) / "none", Path(folder) / "failed").write_final(trainer, module)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    if trainer.is_global_zero:  # which removes it
        assert not list(Path(folder).glob("*failed*"))


def fit_and_write(make_trainer: Any, model_folder: str, data: str, folder: str, strategy: str, way: str) -> None:
    """Two steps, then what AdapterMerger writes; the answers to some prompts on the way."""
    os.environ["PL_GLOBAL_SEED"] = "3"
    world, make = STRATEGIES[strategy]
    module = CausalLM(model_folder, **WAYS[way]["model"], optimizer=sgd, max_new_tokens=6)
    callbacks: list[Callback] = [
        AdapterMerger(Path(folder) / "adapter", Path(folder) / "merged"),
        AnswerScores(max_new_tokens=6, batch_size=5),
    ]
    if (strategy, way) == ("fsdp", "full"):
        callbacks.insert(0, LambdaCallback(on_train_end=partial(fail_together, folder)))
    trainer = make_trainer(
        max_steps=2, devices=world, strategy=make(), use_distributed_sampler=False, callbacks=callbacks
    )
    # 7 rows for validation: ranks do not have the same number of prompts.
    rows = TextDataModule(data, micro_batch_size=2, val_fraction=0.5, test_path=data)
    trainer.fit(module, rows)
    answers = trainer.predict(module, rows)
    assert answers is not None
    own = sum(map(len, answers))
    assert own == 14 // world
    if trainer.is_global_zero:
        lines = read_lines(Path(trainer.default_root_dir) / VALIDATION_ANSWERS)
        expected = [row["expected"].strip() for row in rows.splits.prompts("val")]
        assert [(line["step"], line["expected"]) for line in lines] == [
            (step, one) for step in (0, 2) for one in expected
        ]


def validate(make_trainer: Any, model_folder: str, data: str, saved: str, strategy: str, way: str) -> float:
    world, make = STRATEGIES.get(strategy, (1, lambda: "auto"))
    module = CausalLM(model_folder, **WAYS[way]["model"])
    trainer = make_trainer(devices=world, strategy=make(), use_distributed_sampler=False, plugins=[AnyCheckpointIO()])
    rows = TextDataModule(data, micro_batch_size=2, val_path=data)
    return trainer.validate(module, rows, ckpt_path=saved, verbose=False)[0]["val/loss"]


@pytest.mark.parametrize("way", WAYS)
def test_validation_of_a_checkpoint(
    make_trainer: Any, model_folder: str, write_rows: Any, live_ranks: LiveRanks, tmp_path: Path, way: str
) -> None:
    data, saved = write_rows(count=13), str(tmp_path / "saved.ckpt")
    live_ranks(2, fit, make_trainer, model_folder, data, {**WAYS[way], "epochs": 1, "save": saved}, "fsdp")
    losses = [
        loss
        for strategy, world in (("one_process", 1), ("fsdp", 2), ("fsdp-hybrid", 4))
        for loss in live_ranks(world, validate, make_trainer, model_folder, data, saved, strategy, way)
    ]
    assert losses == pytest.approx([losses[0]] * 7, rel=1e-6)


@pytest.mark.parametrize("way", WAYS)
def test_adapter_and_merged_model_are_those_of_ddp(
    make_trainer: Any, model_folder: str, write_rows: Any, live_ranks: LiveRanks, tmp_path: Path, way: str
) -> None:
    data = write_rows(count=14)
    for strategy in ("ddp", "fsdp"):
        live_ranks(2, fit_and_write, make_trainer, model_folder, data, str(tmp_path / strategy), strategy, way)
    for kind in ("adapter", "merged"):
        if way == "full" and kind == "adapter":
            continue
        wanted, got = (load_whole(tmp_path / strategy / kind) for strategy in ("ddp", "fsdp"))
        assert got.keys() == wanted.keys()
        for name, weight in wanted.items():
            torch.testing.assert_close(got[name], weight, atol=1e-6, rtol=1e-6, msg=name)


@pytest.mark.parametrize("storage", ["uint8"] * SHARDS_INTEGERS + ["bfloat16"])
def test_quantized_base_in_shards(
    make_trainer: Any, model_folder: str, write_rows: Any, live_ranks: LiveRanks, storage: str
) -> None:
    nf4 = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
        bnb_4bit_quant_storage=storage,
    )
    data, how = write_rows(count=13), {"model": {"peft": LORA, "quantization": nf4}}
    one, weights = fit(make_trainer, model_folder, data, how)
    for steps, found in live_ranks(2, fit, make_trainer, model_folder, data, how, "fsdp"):
        assert_same(steps, found, one, weights, 1e-5)


def test_an_int8_base_is_refused_on_shards(make_trainer: Any, model_folder: str) -> None:
    module = CausalLM(model_folder, peft=LORA, quantization=BitsAndBytesConfig(load_in_8bit=True))
    with pytest.raises(RecipeError, match="FSDPStrategy: bitsandbytes keeps the scales of INT8 weights .*; take NF4"):
        FSDPStrategy().check(make_trainer(), module)


def test_integers_are_refused_where_torch_shards_none(
    make_trainer: Any, model_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lit_ft.internals.torch.SHARDS_INTEGERS", False)
    module = CausalLM(model_folder, peft=LORA, quantization=BitsAndBytesConfig(load_in_4bit=True))
    with pytest.raises(RecipeError, match="FSDPStrategy: .* stored as integers.*; set bnb_4bit_quant_storage"):
        FSDPStrategy().check(make_trainer(), module)
    held_in_bf16 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_storage="bfloat16")
    FSDPStrategy().check(make_trainer(), CausalLM(model_folder, peft=LORA, quantization=held_in_bf16))


def test_a_weight_in_two_layers_is_refused_on_shards() -> None:
    def model(*layers: torch.nn.Module) -> torch.nn.ModuleDict:
        return torch.nn.ModuleDict({"embedding": torch.nn.Linear(2, 2), "layers": torch.nn.ModuleList(layers)})

    apart = model(torch.nn.Sequential(torch.nn.Linear(2, 2)), torch.nn.Sequential(torch.nn.Linear(2, 2)))
    check_shared(apart, list(apart["layers"]))
    tied = model(torch.nn.Sequential(torch.nn.Linear(2, 2)), torch.nn.Sequential(torch.nn.Linear(2, 2)))
    tied["layers"][1][0].weight = tied["layers"][0][0].weight
    with pytest.raises(RecipeError, match="^layers.1.0 shares a weight with a layer, .*; take trainer.strategy=ddp"):
        check_shared(tied, list(tied["layers"]))
    apart["layers"][0][0].weight = apart["embedding"].weight
    with pytest.raises(RecipeError, match="^layers.0.0 shares a weight"):
        check_shared(apart, list(apart["layers"]))


@pytest.mark.parametrize("strategy", ["one_process", "fsdp"])
@pytest.mark.parametrize("peft", [None, LORA], ids=["full", "lora"])
def test_selective_checkpointing_changes_no_number(
    make_trainer: Any,
    model_folder: str,
    rows: str,
    one_process: Callable[..., Any],
    live_ranks: LiveRanks,
    strategy: str,
    peft: Any,
) -> None:
    one, weights = one_process({"model": {"peft": peft}})
    how = {"model": {"peft": peft, "gradient_checkpointing": "selective"}}
    world = STRATEGIES.get(strategy, (1,))[0]
    for steps, found in live_ranks(world, fit, make_trainer, model_folder, rows, how, strategy):
        assert_same(steps, found, one, weights, 1e-5)


@pytest.mark.parametrize(("shard_size", "devices"), [(3, 4), (0, 2), (8, 4)])
def test_impossible_meshes_are_refused(shard_size: int, devices: int) -> None:
    with pytest.raises(RecipeError, match=rf"shard_size={shard_size} must divide the {devices} ranks"):
        Trainer(accelerator="cpu", devices=devices, strategy=FSDPStrategy(shard_size=shard_size), logger=False)


OPTIMIZERS: dict[str, Any] = {
    "AdamW, fused": partial(torch.optim.AdamW, lr=1e-2, eps=1e-4, fused=True),
    "Adam": partial(torch.optim.Adam, lr=1e-2, eps=1e-4, weight_decay=0.1),
    "SGD, momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "Adagrad": partial(torch.optim.Adagrad, lr=1e-2, eps=1e-3),
    "Adamax": partial(torch.optim.Adamax, lr=1e-2, eps=1e-3),
    "NAdam": partial(torch.optim.NAdam, lr=1e-2, eps=1e-3),
    "RAdam": partial(torch.optim.RAdam, lr=1e-2, eps=1e-3),
    "RMSprop": partial(torch.optim.RMSprop, lr=1e-3, eps=1e-3),
}


def fit_all(make_trainer: Any, model_folder: str, data: str, strategy: str = "one_process") -> dict[str, Any]:
    return {
        name: fit(make_trainer, model_folder, data, {"model": {}, "optimizer": optimizer, "epochs": 1}, strategy)
        for name, optimizer in OPTIMIZERS.items()
    }


def test_optimizers_on_shards(make_trainer: Any, model_folder: str, write_rows: Any, live_ranks: LiveRanks) -> None:
    data = write_rows(count=21)
    one = fit_all(make_trainer, model_folder, data)
    for found in live_ranks(2, fit_all, make_trainer, model_folder, data, "fsdp"):
        for name, (steps, weights) in found.items():
            assert_same(steps, weights, *one[name], 1e-4, name)


def test_each_optimizer_that_the_table_lets_run_on_shards_is_compared() -> None:
    compared = {f"torch.optim.{made.func.__name__}" for made in OPTIMIZERS.values()}
    assert compared == {row.name for row in compatibility.OPTIMIZERS if row.shards is None and row.mark is None}
