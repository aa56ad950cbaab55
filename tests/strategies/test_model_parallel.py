"""Tensor, sequence and pipeline parallelism, with sharded data parallelism, compute what one process computes."""

import contextlib
import math
import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from architectures import EXPERTS, OTHER_MIXERS, OWN, save_model
from compared_strategies import Record, adamw, assert_same, load_whole, sgd
from lightning.pytorch import Callback
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lit_callbacks import AdapterMerger, LossLedger, SpikeGuard, ThroughputMonitor
from lit_callbacks.distributed.gather import full_tensor, full_weights
from lit_callbacks.loss_ledger.ledger_files import read_visits
from peft import LoraConfig
from ranks import LiveRanks, on_ranks
from shared_fixtures import make_tokenizer, record_cell, tiny_qwen2
from sizes import FULL_SIZE
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, GPT2Config, GPT2LMHeadModel

from benchmarks.parallel.parallel_bytes import ranks_of
from benchmarks.tiny_configs import tiny_config
from lit_ft import CausalLM, ExactMatch, TextDataModule, packed_batch
from lit_ft.checkpointing.storage.checkpoint_io import AnyCheckpointIO
from lit_ft.cli import main
from lit_ft.commands.plan import pretended_rank
from lit_ft.gradient_norm import local
from lit_ft.internals.torch import HAS_ZERO_BUBBLE, SHARDS_INTEGERS
from lit_ft.strategies import FSDPStrategy, ModelParallelStrategy
from lit_ft.strategies.parallel.mesh import ParallelDims, RequestedSizes
from lit_ft.strategies.parallel.pipeline_parallel import ZERO_BUBBLE

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("model parallel")]  # its tests share ranks and fits

LORA = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
WAYS: dict[str, dict[str, Any]] = {"LoRA": {"peft": LORA}, "full": {}}


@dataclass(frozen=True)
class Layout:
    """A mesh, and what else the strategy is told."""

    pipeline: int = 1
    data: int = 1
    tensor: int = 1
    context: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    tied: bool = True
    """Whether embedding and head of the model to compare are one weight."""

    @property
    def world(self) -> int:
        return self.pipeline * self.data * self.context * self.tensor

    @property
    def layers(self) -> int:
        """Layers of the model to compare: two a stage or one for each of a rank's stages, but one on a larger mesh."""
        stages_of_two_layers = self.pipeline > 1 and (self.world == 2 or "schedule" in self.options)
        every = FULL_SIZE and self.pipeline > 1 and self.world <= 4
        return 4 if stages_of_two_layers or every or self.pipeline == 4 else 2

    def strategy(self) -> ModelParallelStrategy:
        return ModelParallelStrategy(
            self.pipeline, self.tensor, self.data, self.context, timeout=timedelta(seconds=60), **self.options
        )


def scheduled(schedule: str, **sizes: int) -> Layout:
    return Layout(pipeline=2, options={"schedule": schedule, "num_microbatches": 4}, **sizes)


SEQUENCE = {"sequence_parallel": True}
TWO_PARTS = {"num_microbatches": 2}
"""On eight ranks: a packed batch in two parts; pipelines of fewer ranks split it into its four rows."""
LAYOUTS = {
    "tp2": Layout(tensor=2),
    "tp2-sequence": Layout(tensor=2, options=SEQUENCE),
    "tp2-whole_logits": Layout(tensor=2, options={"loss_parallel": False}),
    "pp2": Layout(pipeline=2),
    "pp4": Layout(pipeline=4),
    "pp2-given_layers": Layout(pipeline=2, options={"layers_per_stage": [3, 1]}),
    "dp2": Layout(data=2),
    "dp2xtp2": Layout(data=2, tensor=2),
    "dp2xpp2": Layout(data=2, pipeline=2),
    "pp2xtp2": Layout(pipeline=2, tensor=2),
    "pp2xtp2-sequence": Layout(pipeline=2, tensor=2, options=SEQUENCE),
    "dp2xtp2xpp2": Layout(2, 2, 2, options=TWO_PARTS, tied=False),
    "dp2xtp2xpp2-sequence": Layout(2, 2, 2, options={**SEQUENCE, **TWO_PARTS}),
    "cp2": Layout(context=2),
    "cp3": Layout(context=3),
    "cp2xtp2-sequence": Layout(context=2, tensor=2, options=SEQUENCE),
    "dp2xcp2": Layout(data=2, context=2),
    "cp2xpp2": Layout(context=2, pipeline=2),
    "cp2xtp2xpp2-sequence": Layout(pipeline=2, context=2, tensor=2, options={**SEQUENCE, **TWO_PARTS}),
    **{schedule: scheduled(schedule) for schedule in ("GPipe", "LoopedBFS", "Interleaved1F1B")},
    **{schedule: scheduled(schedule) for schedule in ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")},
    "dp2xZBVZeroBubble": scheduled("ZBVZeroBubble", data=2),
    "tp2xDualPipeV": scheduled("DualPipeV", tensor=2),
}


COLUMNS = {
    "TP2": Layout(tensor=2),
    "TP2 + sequence": Layout(tensor=2, options=SEQUENCE),
    "PP2": Layout(pipeline=2),
    "DP2 x TP2 x PP2": Layout(2, 2, 2, options=TWO_PARTS),
    "CP2": Layout(context=2),
    "EP2": Layout(data=2, options={"expert_parallel_size": 2}),
}
"""Columns of the table of architectures."""


@dataclass(frozen=True)
class Run:
    """Steps of 8 of 13 rows: the second of each epoch is short; then a validation of 5 rows. By default one epoch.

    With the default lengths a packed batch has room for all of a step's rows.
    """

    model: dict[str, Any] = field(default_factory=dict)
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd
    precision: Any = "32-true"
    scale: float | None = None
    """First scale of fp16's losses; Lightning refuses ``16-mixed`` on a CPU, and takes it as a plugin."""
    validates: bool = True
    validates_every: int | None = None
    micro_batch_size: int = 4
    max_length: int = 96
    epochs: int = 2
    steps: int = 3 if FULL_SIZE else 2
    resume: str | None = None
    save: str | None = None
    save_after: int | None = None


def fit(
    make_trainer: Any,
    folder: str,
    data: str,
    run: Run,
    layout: Layout | None = None,
    strategy: Any = None,
    callbacks: Sequence[Callback] = (),
) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor], float]:
    """Loss and gradient norm of each step, final weights (rank 0's), loss of the validation or NaN."""
    os.environ["PL_GLOBAL_SEED"] = "3"
    replicas = 1 if layout is None else layout.data
    scaler = None if run.scale is None else torch.amp.GradScaler("cpu", init_scale=run.scale)
    fp16 = [] if scaler is None else [MixedPrecision("16-mixed", "cpu", scaler=scaler)]
    module = CausalLM(folder, **run.model, optimizer=run.optimizer)
    record = Record(run.save_after, run.save)
    trainer = make_trainer(
        max_epochs=run.epochs,
        max_steps=run.steps,
        devices=1 if layout is None else layout.world,
        strategy=strategy() if callable(strategy) else strategy or ("auto" if layout is None else layout.strategy()),
        accumulate_grad_batches=8 // run.micro_batch_size // replicas,
        val_check_interval=run.validates_every,
        gradient_clip_val=1.0,
        log_every_n_steps=1,
        callbacks=[record, *callbacks],
        precision=None if fp16 else run.precision,
        use_distributed_sampler=False,
        plugins=[AnyCheckpointIO(), *fp16],
    )
    val_path = str(Path(data).with_name("val.json")) if run.validates else None
    rows = TextDataModule(data, micro_batch_size=run.micro_batch_size, max_length=run.max_length, val_path=val_path)
    trainer.fit(module, rows, ckpt_path=run.resume)
    if run.save is not None and run.save_after is None:
        trainer.save_checkpoint(run.save)
    gather = getattr(trainer.strategy, "full_weights", full_weights)
    weights = gather(module, lambda _, p: p.requires_grad, keep=trainer.global_rank == 0)
    return record.steps, weights, float(trainer.callback_metrics.get("val/loss", math.nan))


@pytest.fixture(scope="session")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """A Qwen2 with a tied head or with one of its own, random weights and biases."""

    def make(layers: int = 4, tied: bool = True) -> str:
        folder = tmp_path_factory.getbasetemp() / f"qwen2-{layers}-{tied}"
        if folder.exists():
            return str(folder)
        # An odd vocabulary: ranks have unequal parts of it.
        model, tokenizer = tiny_qwen2(vocab_size=383, num_hidden_layers=layers, tie_word_embeddings=tied)
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.data += 0.1 * torch.randn(parameter.shape)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return str(folder)

    return make


@pytest.fixture
def one_process(make_trainer: Any, rows: str, kept: dict[str, Any]) -> Callable[..., Any]:
    """``fit`` on one process, once for each folder and run."""

    def fit_once(folder: str, run: Run) -> Any:
        if (key := f"{folder} {run}") not in kept:
            kept[key] = fit(make_trainer, folder, rows, run)
            assert len(kept[key][0]) == run.steps
        return kept[key]

    return fit_once


@pytest.fixture
def check_same(make_trainer: Any, rows: str, one_process: Any, live_ranks: LiveRanks) -> Callable[..., None]:
    """Compares a layout with one process."""

    def check(folder: str, run: Run, layout: Layout, tolerance: float = 1e-5) -> None:
        results = live_ranks(layout.world, fit, make_trainer, folder, rows, run, layout)
        check_results(results, one_process(folder, run), tolerance)

    return check


def check_results(results: list[Any], wanted: Any, tolerance: float = 1e-5) -> None:
    one, weights, validated = wanted
    for found, _, loss in results:
        assert found == results[0][0]  # every rank logs the same
        assert loss == pytest.approx(validated, rel=tolerance, nan_ok=True)
    assert_same(results[0][0], results[0][1], one, weights, tolerance)


@pytest.fixture(autouse=True)
def _needs_torch(request: Any) -> None:
    """Zero-bubble schedules need torch 2.13."""
    named = str(getattr(request.node, "callspec", "") and request.node.callspec.id)
    if not HAS_ZERO_BUBBLE and any(schedule in named for schedule in ZERO_BUBBLE):
        pytest.skip("zero-bubble schedules are refused before torch 2.13")


@pytest.mark.parametrize(("layout", "way"), product(LAYOUTS, WAYS))
def test_same_numbers(check_same: Any, qwen2: Any, layout: str, way: str) -> None:
    check_same(qwen2(LAYOUTS[layout].layers, LAYOUTS[layout].tied), Run(WAYS[way]), LAYOUTS[layout])


class Calls(TorchDispatchMode):
    """Names of the calls of each process group, by its ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[tuple[int, ...], list[str]] = defaultdict(list)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if func.namespace == "c10d" and (ranks := ranks_of(args)) is not None:
            self.names[ranks].append(func._schema.name)
        return func(*args, **(kwargs or {}))


def fit_and_record(*arguments: Any) -> tuple[Any, dict[tuple[int, ...], list[str]]]:
    with Calls() as calls:
        return fit(*arguments), calls.names


def test_a_pipelines_first_call_is_one_of_all_its_ranks(
    make_trainer: Any, qwen2: Any, rows: str, live_ranks: LiveRanks
) -> None:
    """What NCCL asks for: messages between two ranks may hang otherwise."""
    layout = LAYOUTS["dp2xpp2"]
    run = Run(WAYS["LoRA"], validates=False, steps=1)
    results = live_ranks(4, fit_and_record, make_trainer, qwen2(layout.layers), rows, run, layout)
    first = [calls[ranks][0] for (_, calls), ranks in zip(results, [(0, 2), (1, 3)] * 2, strict=True)]
    assert first == ["c10d::allreduce_"] * 4


def fit_in_detail(*arguments: Any) -> Any:
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        return fit(*arguments)
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)


def test_a_pipeline_runs_with_torch_distributed_debug(
    make_trainer: Any, qwen2: Any, rows: str, one_process: Any, live_ranks: LiveRanks
) -> None:
    """With ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` torch compares the shapes of micro-batches, which vary here."""
    folder, run, layout = qwen2(), Run(WAYS["full"]), LAYOUTS["pp2"]
    check_results(live_ranks(2, fit_in_detail, make_trainer, folder, rows, run, layout), one_process(folder, run))


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B"])
def test_a_validation_within_an_optimizer_step(
    make_trainer: Any, qwen2: Any, rows: str, one_process: Any, live_ranks: LiveRanks, schedule: str
) -> None:
    """Between its micro-batches, whose gradients are reduced once, after the last."""
    folder, layout = qwen2(), Layout(pipeline=2, data=2, options={"schedule": schedule})
    run = Run(micro_batch_size=2, max_length=48, validates_every=1)
    results = live_ranks(4, fit_and_record, make_trainer, folder, rows, run, layout)
    check_results([result for result, _ in results], one_process(folder, run))
    for (_, calls), ranks in zip(results, [(0, 1), (0, 1), (2, 3), (2, 3)], strict=True):
        # Those of two layers, and of what is outside of layers.
        assert sum("reduce_scatter" in name for name in calls[ranks]) == 3 * run.steps


NF4 = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_compute_dtype=torch.float32,
    bnb_4bit_quant_storage="uint8" if SHARDS_INTEGERS else "bfloat16",
)
SHORT: dict[str, Any] = {"steps": 2, "validates": False}
"""A run of one epoch, for what does not change how epochs and validations take turns."""
MORE: dict[str, tuple[str, Run, bool]] = {
    "untied, tp2-sequence": ("tp2-sequence", Run(), False),
    "untied, pp2": ("pp2", Run(), False),
    "head with an adapter": (
        "pp2xtp2",
        Run({"peft": LoraConfig(r=4, target_modules=["q_proj", "lm_head"])}),
        False,
    ),
    "embedding and head in full": (
        "pp2xtp2",
        Run({"peft": LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"])}),
        False,
    ),
    "some layers, pp2": ("pp2", Run({"trainable": [r"layers\.[13]\."]}), True),
    "some layers, dp2xpp2": ("dp2xpp2", Run({"trainable": [r"layers\.[13]\."]}), True),
    "checkpointing, ZBVZeroBubble": ("ZBVZeroBubble", Run({"gradient_checkpointing": True}), True),
    "selective checkpointing, dp2xtp2": ("dp2xtp2", Run({"gradient_checkpointing": "selective"}), True),
    "checkpointing and eager attention, pp2xtp2-sequence": (
        "pp2xtp2-sequence",
        Run({"gradient_checkpointing": True, "attn_implementation": "eager"}),
        True,
    ),
    "random weights and Adam, pp2xtp2": ("pp2xtp2", Run({"init": "random"}, adamw), True),
    "compiled, tp2-sequence": ("tp2-sequence", Run({"compile": "eager"}), True),
    "compiled by AOT, dp2xtp2xpp2": ("dp2xtp2xpp2", Run({"compile": "aot_eager"}), True),
    "NF4 base, pp2": ("pp2", Run({"peft": LORA, "quantization": NF4}), True),
    "NF4 base, dp2xpp2": ("dp2xpp2", Run({"peft": LORA, "quantization": NF4}), True),
    "NF4 base, cp2": ("cp2", Run({"peft": LORA, "quantization": NF4}), True),
    "rsLoRA, tp2": ("tp2", Run({"peft": LoraConfig(r=4, target_modules="all-linear", use_rslora=True)}), True),
    "compiled, cp2": ("cp2", Run({"compile": "eager"}), True),
}


@pytest.mark.parametrize("case", MORE)
def test_same_numbers_in_other_ways(
    check_same: Any,
    make_trainer: Any,
    one_process: Any,
    live_ranks: LiveRanks,
    qwen2: Any,
    rows: str,
    case: str,
    request: Any,
) -> None:
    if "AOT" in case and not request.config.getoption("--matrix"):
        pytest.skip("takes minutes; pytest --matrix FILE runs it")
    name, long, tied = MORE[case]
    run, layout, tolerance = replace(long, **SHORT), LAYOUTS[name], 1e-4 if long.optimizer is adamw else 1e-5
    if "compile" not in run.model:
        layers = 4 if "trainable" in run.model else layout.layers
        check_same(qwen2(layers, tied), run, layout, tolerance)
        return
    # A layer takes seconds to compile, on each rank.
    folder = qwen2(layout.pipeline, tied)
    results = live_ranks(layout.world, fit, make_trainer, folder, rows, run, layout)
    steps, weights, _ = one_process(folder, Run(**SHORT))
    for found, _, _ in results:
        assert found == results[0][0]
    assert_same(results[0][0], results[0][1], steps, weights, tolerance)


class Uncounted(Callback):
    """Callback that makes batches those of a loader which does not count the tokens of an optimizer step."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        del batch["window_tokens"]

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        with contextlib.suppress(ValueError), trainer.strategy.block_backward_sync():
            raise ValueError
        stages = [] if trainer.strategy.pipeline is None else trainer.strategy.pipeline._torch_stages
        assert not any(stage.is_within_window for stage in stages), "an error has left the optimizer step open"


def test_gradients_of_a_step_whose_micro_batches_have_different_weights(
    make_trainer: Any, qwen2: Any, rows: str, live_ranks: LiveRanks
) -> None:
    """FSDP adds them up before it reduces them."""
    run, uncounted = replace(Run(**SHORT), micro_batch_size=2, max_length=48), (Uncounted(),)
    arguments = make_trainer, qwen2(2), rows, run
    wanted = live_ranks(2, fit, *arguments, LAYOUTS["dp2"], None, uncounted)
    check_results(live_ranks(4, fit, *arguments, LAYOUTS["dp2xpp2"], None, uncounted), wanted[0])


PRECISIONS: dict[str, Run] = {
    "bf16-mixed": Run(precision="bf16-mixed"),
    "bf16-true": Run(precision="bf16-true"),
    "bf16 base, LoRA": Run({"peft": LORA, "dtype": "bfloat16"}),
}


@pytest.mark.parametrize(
    ("layout", "precision"),
    product(["tp2-sequence", "dp2xpp2", "pp2xtp2"], PRECISIONS),
)
def test_precisions(
    make_trainer: Any, qwen2: Any, rows: str, one_process: Any, live_ranks: LiveRanks, layout: str, precision: str
) -> None:
    folder, run, place = qwen2(LAYOUTS[layout].layers), replace(PRECISIONS[precision], **SHORT), LAYOUTS[layout]
    one, _, _ = one_process(folder, run)
    for steps, _, _ in live_ranks(place.world, fit, make_trainer, folder, rows, run, place):
        # bf16 rounds to 2^-9 of a value; how it adds up depends on how a step is split.
        for got, wanted in zip(steps, one, strict=True):
            assert got == pytest.approx(wanted, rel=5e-2)


class Overflow(Callback):
    """Callback that makes a gradient of the last rank infinite in the second step."""

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        if trainer.global_step == 1 and trainer.global_rank == trainer.world_size - 1:
            gradients = [local(p.grad) for p in pl_module.parameters() if p.grad is not None]
            for gradient in gradients[:1]:  # none after an empty micro-batch
                gradient[(0,) * gradient.ndim] = math.inf


SCALED = {
    "scales that are too large": (Run(scale=2.0**23, steps=4, validates=False), ()),
    "one rank's gradients overflow": (Run(scale=2.0**10, optimizer=adamw, steps=4, validates=False), (Overflow,)),
}


@pytest.mark.parametrize(("layout", "way"), [*product(["pp2", "tp2"], SCALED), ("dp2xpp2", [*SCALED][1])])
def test_a_gradient_scaler_skips_the_steps_that_it_skips_on_one_process(
    make_trainer: Any, qwen2: Any, rows: str, live_ranks: LiveRanks, layout: str, way: str
) -> None:
    """Within a pipeline too, whose backward passes come before Lightning scales the loss, and on all stages or none."""
    (run, kinds), place = SCALED[way], LAYOUTS[layout]
    if place.data > 1:  # steps of two micro-batches there too
        run = replace(run, micro_batch_size=2, max_length=48)
    folder = qwen2(place.layers)
    one, _, _ = fit(make_trainer, folder, rows, run, callbacks=[kind() for kind in kinds])
    assert len(one) == 4
    assert not all(math.isfinite(norm) for _, norm in one)
    callbacks = [kind() for kind in kinds]
    for found, _, _ in live_ranks(place.world, fit, make_trainer, folder, rows, run, place, None, callbacks):
        assert [norm for _, norm in found] == pytest.approx([norm for _, norm in one], rel=1e-2, nan_ok=True)
        assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in one], rel=1e-2)


# --- what is written, and what is answered --------------------------------------------------------------


def fit_and_write(
    make_trainer: Any, folder: str, data: str, out: str, way: str, layout: Layout | None = None
) -> tuple[float, list[Any]]:
    """Two steps, then what AdapterMerger writes; the losses of a validation and a test, and answers."""
    os.environ["PL_GLOBAL_SEED"] = "3"
    module = CausalLM(folder, **WAYS[way], optimizer=sgd)
    callbacks: list[Callback] = [AdapterMerger(Path(out) / "adapter", Path(out) / "merged")]
    callbacks.append(ExactMatch(max_new_tokens=4, batch_size=5))
    trainer = make_trainer(
        max_steps=2,
        accumulate_grad_batches=2 if layout is None else 2 // layout.data,
        devices=1 if layout is None else layout.world,
        strategy="auto" if layout is None else layout.strategy(),
        use_distributed_sampler=False,
        callbacks=callbacks,
    )
    rows = TextDataModule(data, micro_batch_size=4, val_fraction=0.5, test_path=str(Path(data).with_name("val.json")))
    trainer.fit(module, rows)
    loss = trainer.validate(module, rows, verbose=False)[0]["val/loss"]
    loss += trainer.test(module, rows, verbose=False)[0]["test/loss"]
    return loss, module.answer(["<|user|>one two", "<|user|>three four five"], 4)


@pytest.fixture
def written_by_one(
    make_trainer: Any, rows: str, live_ranks: LiveRanks, tmp_path: Path, kept: dict[str, Any]
) -> Callable[[str, str], Any]:
    """What ``fit_and_write`` writes and returns on one process, once for each model folder and way."""

    def write_once(folder: str, way: str) -> tuple[Path, float, list[Any]]:
        if (key := f"written {folder} {way}") not in kept:
            out = tmp_path / "one"
            kept[key] = out, *live_ranks(1, fit_and_write, make_trainer, folder, rows, str(out), way)[0]
        return kept[key]

    return write_once


@pytest.mark.parametrize(("layout", "way"), product(["tp2-sequence", "dp2xpp2", "pp2xtp2", "ZBVZeroBubble"], WAYS))
def test_adapter_and_merged_model_are_those_of_one_process(
    make_trainer: Any,
    qwen2: Any,
    rows: str,
    written_by_one: Any,
    live_ranks: LiveRanks,
    tmp_path: Path,
    layout: str,
    way: str,
) -> None:
    folder, places, out = qwen2(LAYOUTS[layout].layers), LAYOUTS[layout], tmp_path / "split"
    one, wanted_loss, wanted_answers = written_by_one(folder, way)
    for loss, answers in live_ranks(places.world, fit_and_write, make_trainer, folder, rows, str(out), way, places):
        assert loss == pytest.approx(wanted_loss, rel=1e-5)
        assert answers == wanted_answers
    for kind in ("adapter", "merged"):
        if way == "full" and kind == "adapter":
            continue
        wanted, got = (load_whole(where / kind) for where in (one, out))
        assert got.keys() == wanted.keys()
        for name, weight in wanted.items():
            torch.testing.assert_close(got[name], weight, atol=1e-6, rtol=1e-5, msg=name)


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a Mixtral of two layers."""
    return save_model("mixtral", tmp_path_factory.mktemp("experts") / "mixtral", layers=2)


@pytest.mark.parametrize("column", ["TP2 + sequence", "PP2", "EP2"])
def test_experts_are_written_under_their_published_names(
    make_trainer: Any,
    mixtral: str,
    rows: str,
    written_by_one: Any,
    live_ranks: LiveRanks,
    tmp_path: Path,
    column: str,
) -> None:
    places, out = COLUMNS[column], tmp_path / "split"
    one, *_ = written_by_one(mixtral, "full")
    live_ranks(places.world, fit_and_write, make_trainer, mixtral, rows, str(out), "full", places)
    wanted, got, published = (load_whole(where) for where in (one / "merged", out / "merged", Path(mixtral)))
    assert got.keys() == wanted.keys() == published.keys()
    for name, weight in wanted.items():
        torch.testing.assert_close(got[name], weight, atol=1e-5, rtol=1e-5, msg=name)


# --- architectures -------------------------------------------------------------------------------------

THREE = "DP2 x TP2 x PP2"
CELLS = [
    *((name, THREE) for name in ("gemma2", "gpt_oss", "gpt_neox", "qwen3_5_text")),
    *((name, "TP2 + sequence") for name in ("qwen3_moe", "phi3", "nemotron_h", "minicpm3")),
    ("granite", "PP2"),
    ("mixtral", "EP2"),
    ("gemma2", "CP2"),
    ("gpt_oss", "CP2"),
    ("deepseek_v3", "TP2"),
]
"""Cells that every run compares."""
REFUSED = {
    ("gemma2", "CP2"): "has eager",
    **{(name, "CP2"): "mixes tokens in other ways" for name in ("nemotron_h", "qwen3_5_text")},
    **{("nemotron_h", column): "not say how NemotronHForCausalLM is split into stages" for column in ("PP2", THREE)},
    **{(name, "EP2"): "no plan for experts" for name in (*OWN, "qwen3_5_text", "minicpm3") if name not in EXPERTS},
}

BOUNDS = {"qwen3_5_text": 5e-5}
"""On gradients; those of a gated delta net's decay (A_log, dt_bias, in_proj_a) are small differences of large terms."""


@dataclass
class Gradients(Callback):
    """Whole gradients of the first optimizer step, of what is on this rank."""

    found: dict[str, torch.Tensor] = field(default_factory=dict)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if not self.found:
            self.found = {
                name: full_tensor(p.grad).clone() for name, p in pl_module.named_parameters() if p.grad is not None
            }


def fit_architecture(
    make_trainer: Any, folder: str, data: str, run: Run, layout: Layout | None = None
) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    gradients = Gradients()
    return fit(make_trainer, folder, data, run, layout, callbacks=[gradients])[0], gradients.found


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("architecture", [pytest.param(name, id=name) for name in (*OWN, *OTHER_MIXERS, "deepseek_v3")])
def test_architectures(
    make_trainer: Any,
    write_rows: Any,
    live_ranks: LiveRanks,
    tmp_path: Path,
    architecture: str,
    column: str,
    request: Any,
) -> None:
    if (architecture, column) not in CELLS and not request.config.getoption("--matrix"):
        pytest.skip("a cell of the whole matrix; pytest --matrix FILE runs and writes it")
    layers = 4 if request.config.getoption("--matrix") else 2
    folder, data = save_model(architecture, tmp_path / "model", layers), write_rows(count=13)
    layout = COLUMNS[column]
    if (reason := REFUSED.get((architecture, column))) is not None:
        with pytest.raises(AssertionError, match=f"RecipeError: .*{reason}"):
            live_ranks(layout.world, fit_architecture, make_trainer, folder, data, Run(**SHORT), layout)
        record_cell(architecture, column, "refused")
        return
    of_experts = ["experts.gate_up_proj", "experts.down_proj"] if architecture in EXPERTS else None
    lora = LoraConfig(r=4, target_modules="all-linear", target_parameters=of_experts)
    for run in (Run(**SHORT), Run({"peft": lora}, **SHORT)):
        steps, wanted = fit_architecture(make_trainer, folder, data, run)
        ranks = live_ranks(layout.world, fit_architecture, make_trainer, folder, data, run, layout)
        for found, _ in ranks:
            assert len(found) == 2
            for got, want in zip(found, steps, strict=True):
                assert got == pytest.approx(want, rel=1e-5)
        names = {name for _, gradients in ranks for name in gradients}
        assert names >= wanted.keys()
        worst = max(
            float((gradients[name] - whole).abs().max() / whole.abs().max().clamp(min=1e-6))
            for _, gradients in ranks
            for name, whole in wanted.items()
            if name in gradients
        )
        assert worst < BOUNDS.get(architecture, 1e-5)
        loss = max(abs(got[0] - want[0]) / want[0] for got, want in zip(ranks[0][0], steps, strict=True))
        record_cell(architecture, column, f"{max(loss, worst):.0e}")


def measure(make_trainer: Any, folder: str, data: str, out: str, layout: Layout | None = None) -> dict[str, Any]:
    """What callbacks say of a run; the ledger is in ``out``."""
    os.environ["PL_GLOBAL_SEED"] = "3"
    module = CausalLM(folder, peft=LORA, optimizer=sgd)
    record, monitor, guard = Record(None, None), ThroughputMonitor(), SpikeGuard()
    trainer = make_trainer(
        max_epochs=2,
        accumulate_grad_batches=2 if layout is None else 2 // layout.data,
        devices=1 if layout is None else layout.world,
        strategy="auto" if layout is None else layout.strategy(),
        use_distributed_sampler=False,
        callbacks=[record, monitor, guard, LossLedger(out)],
        log_every_n_steps=1,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_batch, "LEAST_SHARE", 2.0)  # in a pipeline all tokens are computed, and so they are here
        trainer.fit(module, TextDataModule(data, micro_batch_size=4, max_length=96))
    summary = monitor.summary
    return {
        "norms": [norm for _, norm in record.steps],
        "guarded": guard.state_dict()["history"]["gradient norm"],
        "losses": guard.state_dict()["history"]["loss"],
        "flops of a token": summary["model_flops_per_second"] / summary["tokens_per_second"],
        "tokens of a step": summary["tokens_per_second"] * summary["step_seconds"],
        "weights": module.weight_count,
    }


@pytest.mark.parametrize("layout", ["pp2xtp2", "dp2xpp2", "cp2"])
def test_callbacks_measure_what_they_do_on_one_process(
    make_trainer: Any, qwen2: Any, rows: str, live_ranks: LiveRanks, tmp_path: Path, layout: str
) -> None:
    folder, places = qwen2(LAYOUTS[layout].layers), LAYOUTS[layout]
    (one,) = live_ranks(1, measure, make_trainer, folder, rows, str(tmp_path / "one"))
    for found in live_ranks(places.world, measure, make_trainer, folder, rows, str(tmp_path / "ranks"), places):
        assert found["guarded"] == pytest.approx(found["norms"], rel=1e-6)
        assert found["losses"] == pytest.approx(one["losses"], rel=1e-5)
        assert found["flops of a token"] == pytest.approx(one["flops of a token"], rel=1e-3)
        assert found["tokens of a step"] == pytest.approx(one["tokens of a step"], rel=0.2)
        assert found["weights"] == one["weights"]
    # Each visit of a sample once, though all ranks of a replica compute its loss.
    ledgers = [sorted(read_visits(tmp_path / name)) for name in ("one", "ranks")]
    assert [visit[:4] for visit in ledgers[0]] == [visit[:4] for visit in ledgers[1]]
    assert [visit.loss for visit in ledgers[0]] == pytest.approx([visit.loss for visit in ledgers[1]], rel=1e-4)


# --- checkpoints ---------------------------------------------------------------------------------------

OTHERS: dict[str, Any] = {"ddp2": "ddp", "fsdp2": FSDPStrategy}
MOVES = [
    ("pp2xtp2", "one process", "pp2xtp2", "dp2xtp2"),
    ("fsdp2", "dp2xpp2", "ddp2"),
    ("one process", "dp2xtp2xpp2", "pp4"),
    ("tp2-sequence", "ZBVZeroBubble", "pp2"),
]
"""Places that a run moves through, each of which takes one optimizer step; an epoch has two."""


def place_of(name: str) -> tuple[int, tuple[Any, ...]]:
    """World of a layout, of another strategy or of one process, and the arguments of ``fit`` for it."""
    if name == "one process":
        return 1, ()
    if name in LAYOUTS:
        return LAYOUTS[name].world, (LAYOUTS[name],)
    return 2, (Layout(data=2), OTHERS[name])


@pytest.mark.parametrize(
    ("places", "way"),
    [pytest.param(places, way, id=f"{'-'.join(places)}-{way}") for places, way in product(MOVES, WAYS)],
)
def test_a_run_goes_on_under_another_layout(
    make_trainer: Any,
    qwen2: Any,
    rows: str,
    one_process: Any,
    live_ranks: LiveRanks,
    tmp_path: Path,
    places: tuple[str, ...],
    way: str,
) -> None:
    layers = 4 if FULL_SIZE else max(LAYOUTS[name].layers for name in places if name in LAYOUTS)
    folder, run = qwen2(layers), Run(WAYS[way], adamw, steps=len(places), validates=False)
    whole, weights, _ = one_process(folder, run)
    saved: Path | None = None
    for number, name in enumerate(places, start=1):
        world, arguments = place_of(name)
        before, saved = saved, tmp_path / f"after {number}.ckpt"
        leg = replace(run, steps=number, resume=before and str(before), save=str(saved))
        steps, own, _ = live_ranks(world, fit, make_trainer, folder, rows, leg, *arguments)[0]
        assert steps == [pytest.approx(whole[number - 1], rel=1e-4)]
        assert saved.is_dir() == (way == "full" and name in (*LAYOUTS, "fsdp2"))
    assert_same(steps, own, whole[-1:], weights, 1e-4)


@dataclass
class WaitsAlone(Callback):
    """Callback in which rank 0 waits for its checkpoint while the others do something else, as after an error."""

    done: Path

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        if trainer.is_global_zero:
            trainer.strategy._finish_writing()
            self.done.touch()
        deadline = time.monotonic() + 10
        while not self.done.exists():
            assert time.monotonic() < deadline, "rank 0 waits for another rank"
            time.sleep(0.01)


def test_a_checkpoint_is_written_while_training_goes_on(
    make_trainer: Any, qwen2: Any, write_rows: Any, live_ranks: LiveRanks, tmp_path: Path
) -> None:
    """What is written is what there was when it was asked for, and the run is the same."""
    data, folder, saved = write_rows(count=37), qwen2(), str(tmp_path / "saved.ckpt")
    run = Run(optimizer=adamw, epochs=1, steps=5, validates=False)
    whole, weights, _ = fit(make_trainer, folder, data, run)
    places = replace(LAYOUTS["dp2xpp2"], options={"async_save": True})
    first = replace(run, save=saved, save_after=3)
    callbacks = [WaitsAlone(tmp_path / "done")]
    steps, found, _ = live_ranks(places.world, fit, make_trainer, folder, data, first, places, None, callbacks)[0]
    assert_same(steps, found, whole, weights, 1e-4)
    assert Path(saved).is_dir()
    steps, found, _ = fit(make_trainer, folder, data, replace(run, resume=saved))
    assert_same(steps, found, whole[3:], weights, 1e-4)


# --- what does not fit ---------------------------------------------------------------------------------


@pytest.fixture
def no_process_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning would start this test run again, as the second rank."""
    reason = AssertionError("processes are started")
    monkeypatch.setattr(_SubprocessScriptLauncher, "launch", lambda *_, **__: (_ for _ in ()).throw(reason))


def refused(capsys: Any, tmp_path: Path, *options: str, recipe: str = "recipes/quickstart.yaml") -> str:
    """What the command line says before any process starts or weight is read."""
    strategy = ["--trainer.strategy", "lit_ft.strategies.ModelParallelStrategy"]
    with pytest.raises(SystemExit) as stop:
        main(["fit", "--config", recipe, *strategy, "--run_dir", str(tmp_path / "run"), *options])
    assert stop.value.code == 2
    return capsys.readouterr().err


S = "--trainer.strategy."
CASES = {
    "4 = 3 x ?": (
        ["--trainer.devices=4", f"{S}tensor_parallel_size=3"],
        r"error: trainer.strategy: pipeline 1 x data auto x context 1 x tensor 3 must make 4 ranks .*; set "
        r"tensor_parallel_size so that they do, each to one of \[1, 2, 4\], or start a multiple of 3 ranks$",
    ),
    "4 = 2 x 1": (
        ["--trainer.devices=4", f"{S}pipeline_parallel_size=2", f"{S}data_parallel_size=1"],
        r"pipeline 2 x data 1 x context 1 x tensor 1 must make 4 ranks .*; set data_parallel_size to auto or 2$",
    ),
    "2 = 2 x 2 x ?": (
        ["--trainer.devices=2", f"{S}pipeline_parallel_size=2", f"{S}tensor_parallel_size=2"],
        r"set pipeline_parallel_size and tensor_parallel_size so that they do, each to one of \[1, 2\], or start a "
        "multiple of 4 ranks$",
    ),
    "2 = 4 x 1": (
        ["--trainer.devices=2", f"{S}context_parallel_size=4", f"{S}data_parallel_size=1"],
        r"set context_parallel_size so that they do, each to one of \[1, 2\], or start 4 ranks$",
    ),
    "2 = 0 x ?": (
        ["--trainer.devices=2", f"{S}tensor_parallel_size=0"],
        r"set tensor_parallel_size so that they do, each to one of \[1, 2\]$",
    ),
    "two autos": (
        ["--trainer.devices=4", f"{S}tensor_parallel_size=auto"],
        "data_parallel_size, tensor_parallel_size are auto; give all but one",
    ),
    "heads": (
        ["--trainer.devices=4", f"{S}tensor_parallel_size=4"],
        "tensor_parallel_size=4 must divide num_attention_heads=6; use 2$",
    ),
    "key-value heads": (
        ["--trainer.devices=3", f"{S}tensor_parallel_size=3"],
        "tensor_parallel_size=3 must divide (intermediate_size=512|num_key_value_heads=2); use 2",
    ),
    "layers": (
        ["--trainer.devices=8", f"{S}pipeline_parallel_size=8"],
        "8 stages, but Qwen2ForCausalLM has 4 layers; use at most 4",
    ),
    "layers, two a rank": (
        ["--trainer.devices=4", f"{S}pipeline_parallel_size=4", f"{S}schedule=Interleaved1F1B"],
        "Interleaved1F1B makes 8 stages, but Qwen2ForCausalLM has 4 layers; use at most 2",
    ),
    "layers given": (
        ["--trainer.devices=2", f"{S}pipeline_parallel_size=2", f"{S}layers_per_stage=[3,2]"],
        r"layers_per_stage=\[3, 2\] must be 2 numbers of at least 1 .* add up to the 4 layers",
    ),
    "schedule": (["--trainer.devices=2", f"{S}schedule=2F2B"], "schedule='2F2B' is unknown; use one of"),
    "no micro-batch": (["--trainer.devices=2", f"{S}num_microbatches=0"], "num_microbatches=0 must be 1 or more"),
    "few micro-batches": (
        ["--trainer.devices=4", f"{S}pipeline_parallel_size=4", "--data.micro_batch_size=2"],
        "num_microbatches=2 leaves stages idle: a pipeline of 4 needs as many at least",
    ),
    "few micro-batches, given": (
        ["--trainer.devices=2", f"{S}pipeline_parallel_size=2", f"{S}num_microbatches=1"],
        "needs as many at least; set it to null or to a multiple of 2",
    ),
    "batch and micro-batches": (
        ["--trainer.devices=2", f"{S}pipeline_parallel_size=2", f"{S}num_microbatches=6"],
        r"num_microbatches=6 must divide data.micro_batch_size=16; use one of \[2, 4, 8, 16\], or set .* to 18",
    ),
    "quantized base": (
        [
            "--trainer.devices=2",
            f"{S}tensor_parallel_size=2",
            "--config=recipes/tuning/qlora_nf4.yaml",
            "--merge=false",
        ],
        "tensor_parallel_size=2 cannot shard the packed weights of a quantized base",
    ),
    "zero bubbles and selective checkpointing": (
        [
            "--trainer.devices=2",
            f"{S}pipeline_parallel_size=2",
            f"{S}schedule=ZBVZeroBubble",
            "--model.gradient_checkpointing=selective",
        ],
        "ZBVZeroBubble runs the backward pass of a layer twice, .* set it to true, or take 1F1B",
    ),
    "INT8 base": (
        ["--trainer.devices=2", f"{S}data_parallel_size=2", "--config=recipes/tuning/qlora_int8.yaml", "--merge=false"],
        "data_parallel_size=2: bitsandbytes keeps the scales of INT8 weights",
    ),
    "method": (
        ["--trainer.devices=2", f"{S}tensor_parallel_size=2", "--config=recipes/tuning/ia3.yaml"],
        r"IA3 was not compared with one process \(tensor_parallel_size=2\); take LoraConfig on linear layers",
    ),
    "DoRA": (
        ["--trainer.devices=2", f"{S}tensor_parallel_size=2", "--config=recipes/tuning/dora.yaml"],
        "use_dora=True looks at whole weights",
    ),
    "optimizer": (
        ["--trainer.devices=2", f"{S}tensor_parallel_size=2", "--config=recipes/optimizers/muon.yaml"],
        "SplitOptimizer was not compared with one process on sharded tensors; take one of torch.optim's AdamW",
    ),
    "virtual tokens": (
        [
            "--trainer.devices=2",
            f"{S}pipeline_parallel_size=2",
            "--config=recipes/tuning/p_tuning.yaml",
            "--merge=false",
        ],
        "P_TUNING adds virtual tokens, which pipeline, tensor and context parallelism do not know of",
    ),
    "a stage that does not train": (
        ["--trainer.devices=2", f"{S}pipeline_parallel_size=2", "--model.peft=null", "--model.trainable=[layers.3]"],
        r"nothing trains in stage 0 \(layers 0 to 1\)",
    ),
    "experts": (
        ["--trainer.devices=2", f"{S}expert_parallel_size=2"],
        "expert_parallel_size=2, but Hugging Face has no plan for experts in Qwen2ForCausalLM",
    ),
    "noise": (
        ["--trainer.devices=2", f"{S}context_parallel_size=2", "--model.neftune_alpha=5"],
        "neftune_alpha=5.0 draws noise for whole samples",
    ),
}


@pytest.mark.usefixtures("no_process_starts")
@pytest.mark.parametrize("case", CASES)
def test_what_does_not_fit_is_refused_before_anything_starts(capsys: Any, tmp_path: Path, case: str) -> None:
    options, message = CASES[case]
    assert re.search(message, refused(capsys, tmp_path, *options))


@pytest.mark.usefixtures("no_process_starts")
def test_zero_bubbles_need_a_newer_torch(capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lit_ft.internals.torch.HAS_ZERO_BUBBLE", False)
    options = ["--trainer.devices=2", f"{S}pipeline_parallel_size=2", f"{S}schedule=ZBVZeroBubble"]
    assert "schedule=ZBVZeroBubble needs torch 2.13 or newer" in refused(capsys, tmp_path, *options)


EXPERT_CASES = {
    "number": (["--trainer.devices=3", f"{S}expert_parallel_size=3"], "expert_parallel_size=3 must divide the number"),
    "ranks": (["--trainer.devices=3", f"{S}expert_parallel_size=2"], "expert_parallel_size=2 must divide the 3 ranks"),
    "tensor": (
        ["--trainer.devices=8", f"{S}tensor_parallel_size=2", f"{S}expert_parallel_size=4"],
        "experts are assigned to the tensor-parallel ranks; set expert_parallel_size to 2",
    ),
    "router": (
        [
            *("--trainer.devices=2", f"{S}tensor_parallel_size=2", "--model.peft=peft.LoraConfig"),
            *("--model.peft.init_args.target_modules=[gate]", "--model.peft.init_args.r=2"),
        ],
        "gate: under tensor parallelism LoRA on a parameter of MixtralTopKRouter multiplies whole tensors",
    ),
    "experts in full": (
        [
            *("--trainer.devices=2", f"{S}expert_parallel_size=2", "--model.peft=peft.LoraConfig"),
            *("--model.peft.init_args.target_modules=[q_proj]", "--model.peft.init_args.modules_to_save=[experts]"),
        ],
        "an adapter changes experts to ModulesToSaveWrapper; take LoRA on gate_up_proj and down_proj",
    ),
    "experts in full, tensor": (
        [
            *("--trainer.devices=2", f"{S}tensor_parallel_size=2", "--model.peft=peft.LoraConfig"),
            *("--model.peft.init_args.target_modules=[q_proj]", "--model.peft.init_args.modules_to_save=[experts]"),
        ],
        "an adapter changes experts to ModulesToSaveWrapper, of which each rank would compute a part as if it were all",
    ),
    "a sharded layer in full, tensor": (
        [
            *("--trainer.devices=2", f"{S}tensor_parallel_size=2", "--model.peft=peft.LoraConfig"),
            *("--model.peft.init_args.target_modules=[q_proj]", "--model.peft.init_args.modules_to_save=[o_proj]"),
        ],
        r"model.peft: modules_to_save trains o_proj of \w+Attention in full, which tensor parallelism shards",
    ),
    "by PEFT": (
        [
            *("--trainer.devices=2", f"{S}expert_parallel_size=2", "--model.peft=peft.LoraConfig"),
            *("--model.peft.init_args.target_parameters=[mlp.experts.down_proj]", "--model.fused_lora=false"),
        ],
        "expert_parallel_size=2 without model.fused_lora: PEFT adds LoRA to whole tensors",
    ),
    "compiled": (
        [
            *("--trainer.devices=2", f"{S}tensor_parallel_size=2", "--model.peft=peft.LoraConfig"),
            *("--model.peft.init_args.target_parameters=[mlp.experts.down_proj]", "--model.compile=eager"),
        ],
        "torch cannot compile LoRA on parameters .* under tensor_parallel_size=2; set compile to false",
    ),
    "by PEFT, tensor": (
        [
            *("--trainer.devices=2", f"{S}tensor_parallel_size=2", "--model.peft=peft.LoraConfig"),
            *("--model.peft.init_args.target_parameters=[mlp.experts.down_proj]", "--model.fused_lora=false"),
        ],
        "tensor_parallel_size=2 without model.fused_lora: PEFT adds LoRA to whole tensors",
    ),
}


@pytest.mark.usefixtures("no_process_starts")
@pytest.mark.parametrize("case", EXPERT_CASES)
def test_experts_that_cannot_be_dealt_out(capsys: Any, tmp_path: Path, write_rows: Any, case: str) -> None:
    model = ["--model.pretrained", save_model("mixtral", tmp_path / "mixtral"), "--model.peft=null"]
    options, message = EXPERT_CASES[case]
    assert re.search(message, refused(capsys, tmp_path, *model, "--merge=false", *options))


def test_options_of_what_there_is_not_say_so() -> None:
    options = {"schedule": "GPipe", "num_microbatches": 4, "sequence_parallel": True, "loss_parallel": False}
    sizes = ParallelDims(RequestedSizes(1, "auto", 1, 1), 1, **options)  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="has no effect") as said:
        sizes.check_batches(sizes.sizes(nodes=1, devices=2), 16, torch.nn.Module())
    assert [str(one.message).partition(";")[0] for one in said] == [
        "trainer.strategy schedule=GPipe has no effect with pipeline_parallel_size=1",
        "trainer.strategy num_microbatches=4 has no effect with pipeline_parallel_size=1",
        "trainer.strategy sequence_parallel=True has no effect with tensor_parallel_size=1",
        "trainer.strategy loss_parallel=False has no effect with tensor_parallel_size=1",
    ]


@pytest.mark.usefixtures("no_process_starts")
def test_an_architecture_without_a_plan(capsys: Any, tmp_path: Path) -> None:
    folder = tmp_path / "gpt2"
    config = GPT2Config(vocab_size=384, n_embd=48, n_layer=4, n_head=4, n_positions=512)
    GPT2LMHeadModel(config).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    model = ["--model.pretrained", str(folder), "--model.peft=null", "--trainer.devices=2", "--merge=false"]
    said = refused(capsys, tmp_path, *model, f"{S}tensor_parallel_size=2")
    assert "Hugging Face has no plan for GPT2LMHeadModel; give one by trainer.strategy.init_args.tp_plan" in said
    said = refused(capsys, tmp_path, *model, f"{S}pipeline_parallel_size=2")
    assert "Hugging Face does not say how GPT2LMHeadModel is split into stages" in said
    plan = "{transformer.h.*.attn.c_proj: sideways}"
    assert "styles ['sideways'], which are not supported" in refused(
        capsys, tmp_path, *model, f"{S}tensor_parallel_size=2", f"{S}tp_plan={plan}"
    )


@pytest.mark.usefixtures("no_process_starts")
@pytest.mark.parametrize(
    ("name", "sizes", "reason"),
    [
        ("gemma4_text", ["pipeline_parallel_size=2"], "gives each layer more than the hidden states of the one before"),
        (
            "gemma4_text",
            ["tensor_parallel_size=2", "sequence_parallel=true"],
            "has more beside them (embed_tokens_per_layer, per_layer_model_projection, per_layer_proj",
        ),
        ("glm_moe_dsa", ["pipeline_parallel_size=2"], "than the hidden states of the one before (prev_topk_indices)"),
        (
            "qwen4_exp_text",
            ["tensor_parallel_size=2", "sequence_parallel=true"],
            "has more beside them (ple_input_ids)",
        ),
        (
            "zaya",
            ["tensor_parallel_size=2", "sequence_parallel=true"],
            "(input_hidden_states_bias, input_hidden_states_sc",
        ),
        (
            "gemma3n_text",
            ["tensor_parallel_size=2"],
            "Gemma3nForCausalLM reads weights in Gemma3nTextAltUp past",
        ),
        ("llama4_text", ["tensor_parallel_size=2"], "each expert of Llama4TextExperts computes all tokens"),
    ],
)
def test_models_that_cannot_be_split_in_some_way(
    capsys: Any, tmp_path: Path, name: str, sizes: list[str], reason: str
) -> None:
    config = tiny_config(name, vocab_size=384)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    model = ["--model.pretrained", str(tmp_path / "model"), "--model.peft=null", "--trainer.devices=2"]
    assert reason in refused(capsys, tmp_path, *model, "--merge=false", *(f"{S}{size}" for size in sizes))


def test_a_fit_uses_no_process_group_of_an_earlier_plan(
    make_trainer: Any, qwen2: Any, rows: str, one_process: Any
) -> None:
    folder, layout = qwen2(2), LAYOUTS["dp2xtp2"]
    with pretended_rank(0, layout.world):
        strategy, module = layout.strategy(), CausalLM(folder)
        module.trainer = make_trainer(devices=layout.world, strategy=strategy)
        strategy._lightning_module = strategy.model = module
        module.model = module.check()
        strategy.setup_environment()
        strategy.shard(module)
        for weight in module.parameters():
            full_tensor(torch.empty_like(weight, device="cpu"))
    # The ranks are forks of this process.
    run = Run(**SHORT)
    results = on_ranks(layout.world, fit, make_trainer, folder, rows, run, layout, timeout=150)
    check_results(results, one_process(folder, run))
