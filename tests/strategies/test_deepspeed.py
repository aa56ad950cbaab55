"""DeepSpeed's ZeRO computes what one process computes; what it cannot do is refused before anything starts."""

import hashlib
import json
import math
import os
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from architectures import save_model
from compared_strategies import assert_same
from lightning.pytorch import Callback, Trainer
from lit_callbacks import AdapterMerger
from lit_callbacks.distributed.gather import full_weights
from ranks import LiveRanks, on_ranks
from safetensors.torch import load_file
from shared_fixtures import make_rows, record_difference
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, Qwen2Config

from benchmarks.tiny_configs import tiny_config
from lit_ft import CausalLM, RecipeError, TextDataModule
from lit_ft.checkpointing.storage.checkpoint_io import AnyCheckpointIO
from lit_ft.cli import main
from lit_ft.errors import NotFinite
from lit_ft.strategies import DeepSpeedStrategy
from lit_ft.strategies.zero import state as zero_state
from lit_ft.strategies.zero.config import check_recipe
from lit_ft.training.answer_scores.exact_match import ExactMatch
from lit_ft.training.loss import token_cross_entropy

pytestmark = pytest.mark.xdist_group("DeepSpeed")  # its tests share ranks and fits
LORA = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4)  # near-zero gradients do not amplify rounding


def zero(stage: int, **settings: Any) -> DeepSpeedStrategy:
    # By default, weights as small as these stay whole at stage 3.
    config = {"stage": stage, "stage3_param_persistence_threshold": 0, **settings}
    return DeepSpeedStrategy(config={"zero_optimization": config})


@dataclass(frozen=True)
class Case:
    """A run of two epochs: 11 rows in steps of 8; in the second of an epoch, a rank has one micro-batch, not two."""

    strategy: Callable[[], Any]
    model: dict[str, Any] = field(default_factory=dict)
    untied: bool = False
    """Whether the head has weights of its own."""
    world: int = 2
    local_world: int | None = None
    precision: Any = "32-true"
    tokens_per_chunk: int | None = None
    """Supervised tokens whose logits exist at a time; ranks then call the head unequally often."""
    data: dict[str, Any] = field(default_factory=dict)
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd
    validates: bool = False
    """Whether a validation of 3 rows follows each micro-batch."""
    saves: bool = False
    """Whether it writes a checkpoint after its first epoch, at ``saved_by``."""
    resume: str | None = None

    @property
    def on_one_process(self) -> "Case":
        return replace(self, strategy=partial(str, "auto"), world=1, local_world=None, validates=False, saves=False)


def saved_by(folder: str, case: Case) -> str:
    """Path of the checkpoint that a case writes."""
    return f"{folder}/{hashlib.sha256(str(case).encode()).hexdigest()[:16]}.ckpt"


class Record(Callback):
    """Loss and gradient norm of each optimizer step; what each rank holds of the model; a checkpoint on the way."""

    def __init__(self, save: str | None) -> None:
        self.save = save
        self.steps: list[tuple[float, float]] = []
        self.held: dict[str, tuple[int, int, torch.dtype]] = {}

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        for name, parameter in pl_module.named_parameters():
            share: Any = getattr(parameter, "ds_tensor", parameter)
            self.held[name] = share.numel(), getattr(parameter, "ds_numel", parameter.numel()), share.dtype

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if not trainer.fit_loop._should_accumulate():
            metrics = trainer.callback_metrics
            self.steps.append((float(metrics["train/loss"]), float(metrics["train/grad_norm"])))

    def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
        if self.save is not None and trainer.current_epoch == 0:
            trainer.save_checkpoint(self.save)


def fit(folder: str, case: Case) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor], dict[str, Any]]:
    """Losses and norms of the steps, final weights, and what each rank held."""
    os.environ["PL_GLOBAL_SEED"] = "3"
    chunk, token_cross_entropy.LOGITS_PER_CHUNK = (
        token_cross_entropy.LOGITS_PER_CHUNK,
        (case.tokens_per_chunk or 10**6) * 384,
    )
    record = Record(saved_by(folder, case) if case.saves else None)
    trainer = Trainer(
        accelerator="cpu",
        devices=case.world,
        strategy=case.strategy(),
        precision=case.precision,
        max_epochs=2,
        accumulate_grad_batches=4 // case.world,
        gradient_clip_val=1.0,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        val_check_interval=1 if case.validates else None,
        callbacks=[record],
        plugins=[AnyCheckpointIO()],
    )
    module = CausalLM(folder, **case.model, optimizer=case.optimizer)
    val_path = f"{folder}/val.json" if case.validates else None
    options = {"micro_batch_size": 2, "max_length": 96, "val_path": val_path, **case.data}
    trainer.fit(module, TextDataModule(f"{folder}/rows.json", **options), ckpt_path=case.resume)
    token_cross_entropy.LOGITS_PER_CHUNK = chunk
    os.environ.pop("PL_GLOBAL_SEED")
    return record.steps, full_weights(module, lambda _, p: p.requires_grad), record.held


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, model_folder: str) -> Callable[[bool], str]:
    """The model of ``model_folder``, its head tied or untied; beside it rows, and others for validation."""
    tmp = tmp_path_factory.mktemp("deepspeed")

    def folder_of(untied: bool = False) -> str:
        folder = tmp / ("untied" if untied else "tied")
        if not folder.exists():
            config = Qwen2Config.from_pretrained(model_folder, tie_word_embeddings=not untied)
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(config).save_pretrained(folder)
            AutoTokenizer.from_pretrained(model_folder).save_pretrained(folder)
            for name, count, seed in (("rows.json", 11, 0), ("val.json", 3, 1), ("test.json", 5, 2)):
                (folder / name).write_text(json.dumps(make_rows(count, seed), ensure_ascii=False), encoding="utf-8")
        return str(folder)

    return folder_of


@pytest.fixture(scope="module")
def fit_once(live_ranks: LiveRanks) -> Callable[[str, Case], list[Any]]:
    """What ``fit`` returns on each rank; the same case runs once."""
    results: dict[str, list[Any]] = {}

    def once(folder: str, case: Case) -> list[Any]:
        if (key := f"{folder} {case}") not in results:
            if case.local_world is None:
                results[key] = live_ranks(case.world, fit, folder, case)
            else:
                results[key] = on_ranks(case.world, fit, folder, case, timeout=90, local_world=case.local_world)
        return results[key]

    return once


NF4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
WAYS: dict[str, dict[str, Any]] = {"LoRA": {"peft": LORA}, "full": {}}
STAGES = {f"zero{stage}": stage for stage in (1, 2, 3)}
SAME: dict[str, Case] = {
    **{
        f"{name}, {way}": Case(partial(zero, stage), WAYS[way], validates=True, saves=True)
        for name, stage in STAGES.items()
        for way in WAYS
    },
    **{
        f"zero3, {way}, own head, chunked logits": Case(
            partial(zero, 3), WAYS[way], untied=True, tokens_per_chunk=4, validates=True
        )
        for way in WAYS
    },
    "zero3, full, tied head, chunked logits": Case(partial(zero, 3), tokens_per_chunk=4, validates=True),
    "zero3, LoRA on the head": Case(
        partial(zero, 3), {"peft": peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head"])}, True, tokens_per_chunk=4
    ),
    "zero3, checkpointed activations": Case(partial(zero, 3), {"gradient_checkpointing": True}),
    "zero3, attention sample by sample": Case(partial(zero, 3), {"attn_implementation": "eager"}, validates=True),
    **{
        f"{name}, rows apart": Case(partial(zero, stage), data={"join_micro_batches": False}, validates=True)
        for name, stage in STAGES.items()
    },
    "zero2, drawn weights": Case(partial(zero, 2), {"init": "random", "peft": LORA}),
    "zero3, drawn weights": Case(partial(zero, 3), {"init": "random"}),
    "zero3, added tokens": Case(partial(zero, 3), {"added_tokens": ["<a>", "<b>"]}),
    "zero2, offloaded": Case(partial(zero, 2, offload_optimizer={"device": "cpu"}), validates=True),
    "zero3, offloaded": Case(
        partial(zero, 3, offload_optimizer={"device": "cpu"}, offload_param={"device": "cpu"}),
        {"peft": LORA},
        validates=True,
    ),
    "zero3, two copies on two nodes": Case(partial(zero, 3, zero_hpz_partition_size=2), world=4, local_world=2),
    "zero2, NF4 base": Case(partial(zero, 2), {"peft": LORA, "quantization": NF4}),
    "zero3, NF4 base": Case(partial(zero, 3), {"peft": LORA, "quantization": NF4}),
}


HALF: dict[str, Case] = {
    f"{name}, {way}, {precision}": Case(partial(zero, stage), WAYS[way], precision=precision)
    for name, stage in STAGES.items()
    for way in WAYS
    for precision in ("bf16-mixed", "bf16-true")
}
BF16_BASE: dict[str, Case] = {
    f"{name}, bf16 base": Case(partial(zero, stage), {"peft": LORA, "dtype": "bfloat16"})
    for name, stage in STAGES.items()
}


@pytest.mark.processes
@pytest.mark.parametrize("name", SAME)
def test_same_numbers(fit_once: Any, folders: Any, name: str) -> None:
    case = SAME[name]
    folder = folders(case.untied)
    ((one, weights, _),) = fit_once(folder, case.on_one_process)
    for steps, found, held in fit_once(folder, case):
        assert len(steps) == 4
        for got, wanted in zip(steps, one, strict=True):
            assert got == pytest.approx(wanted, rel=1e-5)
        assert found.keys() == weights.keys()
        for key, weight in weights.items():
            torch.testing.assert_close(found[key], weight, atol=1e-5, rtol=1e-5, msg=key)
        pairs = [(got[0], wanted[0]) for got, wanted in zip(steps, one, strict=True)]
        record_difference(pairs, [(found[key], weight) for key, weight in weights.items()])
        shares = [-(-whole // case.world) if "zero3" in name else whole for _, whole, _ in held.values()]
        assert [own for own, *_ in held.values()] == shares


@pytest.mark.processes
def test_experts_that_are_modules_compute_the_same_at_stage_3(fit_once: Any, folders: Any, tmp_path: Path) -> None:
    """DBRX calls a module for each expert that a token reaches, and ranks differ in their number."""
    folder = shutil.copytree(folders(), tmp_path / "dbrx")
    torch.manual_seed(0)
    experts = {"moe_num_experts": 16, "moe_top_k": 1, "ffn_hidden_size": 64, "moe_jitter_eps": None}
    AutoModelForCausalLM.from_config(tiny_config("dbrx", ffn_config=experts)).save_pretrained(folder)
    case = Case(partial(zero, 3), data={"join_micro_batches": False})
    ((one, weights, _),) = fit_once(str(folder), case.on_one_process)
    for steps, found, _ in fit_once(str(folder), case):
        assert steps == [pytest.approx(wanted, rel=1e-5) for wanted in one]
        for key, weight in weights.items():
            torch.testing.assert_close(found[key], weight, atol=1e-5, rtol=1e-5, msg=key)


@pytest.mark.processes
@pytest.mark.parametrize("name", HALF)
def test_half_precision(fit_once: Any, folders: Any, name: str) -> None:
    case = HALF[name]
    folder = folders(case.untied)
    ((one, _, _),) = fit_once(folder, case.on_one_process)
    for steps, _, held in fit_once(folder, case):
        # bf16 rounds to 2^-9 of a value; how it adds up depends on how a step is split, and on the processor.
        for got, wanted in zip(steps, one, strict=True):
            assert got == pytest.approx(wanted, rel=3e-2)
        assert {dtype for *_, dtype in held.values()} == {torch.bfloat16}


@pytest.mark.processes
@pytest.mark.parametrize("name", BF16_BASE)
def test_full_precision_casts_nothing(fit_once: Any, folders: Any, name: str) -> None:
    case = BF16_BASE[name]
    folder = folders(case.untied)
    ((one, _, _),) = fit_once(folder, case.on_one_process)
    for steps, _, held in fit_once(folder, case):
        for got, wanted in zip(steps, one, strict=True):
            assert got == pytest.approx(wanted, rel=1e-2)
        for key, (*_, dtype) in held.items():
            assert dtype == (torch.float32 if ".lora_" in key else torch.bfloat16), key


PLACES: dict[str, Callable[[], Any]] = {
    **{name: partial(zero, stage) for name, stage in STAGES.items()},
    "ddp": partial(str, "ddp"),
    "one process": partial(str, "auto"),
}
MOVES = [
    *((name, name) for name in STAGES),
    ("zero2", "one process"),
    ("one process", "zero3"),
    ("zero3", "ddp"),
    ("ddp", "zero1"),
]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("before", "after", "way", "optimizer"),
    [
        pytest.param(*move, way, optimizer, id=f"{'-'.join(move)}-{way}-{optimizer.__name__}")
        for move, way, optimizer in product(MOVES, WAYS, (sgd, adamw))
    ],
)
def test_resumes(
    fit_once: Any,
    folders: Any,
    before: str,
    after: str,
    way: str,
    optimizer: Callable[[Any], Any],
) -> None:
    def at(place: str, **options: Any) -> Case:
        return Case(PLACES[place], WAYS[way], optimizer=optimizer, world=2 - (place == "one process"), **options)

    uninterrupted = at(before, validates=True, saves=True)
    whole = fit_once(folders(), uninterrupted)
    rest = fit_once(folders(), at(after, resume=saved_by(folders(), uninterrupted)))
    steps, weights, _ = whole[0]
    tolerance = 0 if before == after else 1e-5
    for again, own, _ in rest:
        assert len(again) == 2
        for got, wanted in zip(again, steps[2:], strict=True):
            assert got == pytest.approx(wanted, rel=tolerance, abs=0)
        for key, weight in weights.items():
            torch.testing.assert_close(own[key], weight, atol=tolerance, rtol=tolerance, msg=key)


def slower(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=2e-3, eps=1e-4, weight_decay=0.1)


@pytest.mark.processes
@pytest.mark.parametrize("stage", ["zero2", "zero3"])
def test_a_run_goes_on_with_another_learning_rate(fit_once: Any, folders: Any, stage: str) -> None:
    before = Case(PLACES[stage], WAYS["LoRA"], optimizer=adamw, saves=True)
    fit_once(folders(), before)
    rest = replace(before, optimizer=slower, saves=False, resume=saved_by(folders(), before))
    (one, weights, _), *_ = fit_once(folders(), replace(rest, strategy=partial(str, "auto"), world=1))
    for steps, found, _ in fit_once(folders(), rest):
        assert_same(steps, found, one, weights, 1e-5)


@pytest.mark.processes
def test_checkpoints_keep_what_bf16_would_round(fit_once: Any, folders: Any) -> None:
    whole = Case(partial(zero, 3), optimizer=adamw, precision="bf16-mixed", saves=True)
    steps, weights, _ = fit_once(folders(), whole)[0]
    saved = saved_by(folders(), whole)
    checkpoint = torch.load(saved, weights_only=True)
    assert {tensor.dtype for tensor in checkpoint["state_dict"].values()} == {torch.float32}
    assert any((tensor != tensor.bfloat16()).any() for tensor in checkpoint["state_dict"].values())
    again, own, _ = fit_once(folders(), replace(whole, saves=False, resume=saved))[0]
    assert again == steps[2:]
    for name, weight in weights.items():
        assert torch.equal(own[name], weight), name


def fit_and_answer(folder: str, strategy: Callable[[], Any], model: dict[str, Any], out: str) -> list[str]:
    """Two steps; answers before, after and by ``predict``; the adapter and the merged model."""
    os.environ["PL_GLOBAL_SEED"] = "3"
    trainer = Trainer(
        default_root_dir=out,
        accelerator="cpu",
        devices=2,
        strategy=strategy(),
        max_steps=2,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[AdapterMerger(Path(out) / "adapter", Path(out) / "merged"), ExactMatch(6, batch_size=5)],
    )
    module = CausalLM(folder, **model, optimizer=sgd, max_new_tokens=6)
    rows = TextDataModule(f"{folder}/rows.json", micro_batch_size=2, val_fraction=0.5, test_path=f"{folder}/test.json")
    trainer.fit(module, rows)
    answers: Any = trainer.predict(module, rows)
    return [row["answer"] for batch in answers for row in batch]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("untied", "way"),
    [
        pytest.param(untied, way, id=f"{'untied' if untied else 'tied'}-{way}")
        for untied, way in product([False, True], WAYS)
    ],
)
def test_answers_adapter_and_merged_model_are_those_of_ddp(
    folders: Any, live_ranks: LiveRanks, tmp_path: Path, untied: bool, way: str
) -> None:
    folder = folders(untied)
    answers = {
        place: live_ranks(2, fit_and_answer, folder, PLACES[place], WAYS[way], str(tmp_path / place))
        for place in ("ddp", "zero3")
    }
    assert answers["zero3"] == answers["ddp"]
    files = ["merged/model.safetensors", *(["adapter/adapter_model.safetensors"] if way == "LoRA" else [])]
    for file in files:
        wanted, got = (load_file(tmp_path / place / file) for place in ("ddp", "zero3"))
        assert got.keys() == wanted.keys()
        for name, weight in wanted.items():
            torch.testing.assert_close(got[name], weight, atol=1e-6, rtol=1e-6, msg=name)


# --- what is refused ---------------------------------------------------------------------------------


def trainer_with(strategy: Any, **options: Any) -> Trainer:
    return Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, strategy=strategy, **options)


CONTRADICTIONS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "accumulation": (
        {"gradient_accumulation_steps": 8},
        {"accumulate_grad_batches": 2},
        r"gradient_accumulation_steps=8, but trainer.accumulate_grad_batches=2",
    ),
    "clipping": (
        {"gradient_clipping": 1.0},
        {"gradient_clip_val": 0.5},
        r"gradient_clipping=1.0, but trainer.gradient_clip_val=0.5",
    ),
    "no clipping": ({"gradient_clipping": 1.0}, {}, r"gradient_clipping=1.0, but trainer.gradient_clip_val=0;"),
    "micro-batch": (
        {"train_micro_batch_size_per_gpu": 4},
        {},
        r"train_micro_batch_size_per_gpu=4, but data.micro_batch_size=2",
    ),
    "batch": (
        {"train_batch_size": 64},
        {"accumulate_grad_batches": 3, "devices": 2},
        r"train_batch_size=64, but data.micro_batch_size x trainer.accumulate_grad_batches x 2 ranks=12",
    ),
    "bf16": ({"bf16": {"enabled": True}}, {}, r"bf16.enabled=true, but trainer.precision=32-true"),
    "no bf16": (
        {"bf16": {"enabled": False}},
        {"precision": "bf16-mixed"},
        r"bf16.enabled=false, but trainer.precision=bf16-mixed",
    ),
    "fp16": ({"fp16": {"enabled": True}}, {}, r"fp16.enabled=true, but trainer.precision=32-true"),
    "optimizer": (
        {"optimizer": {"type": "AdamW"}},
        {},
        r'optimizer=\{"type": "AdamW"\}, but the recipe says optimizer',
    ),
    "tensor parallel": ({"tensor_parallel": {"autotp_size": 2}}, {}, r"tensor_parallel.autotp_size=2"),
    "clipping by value": (
        {},
        {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"},
        r"gradient_clip_algorithm=value, but DeepSpeed clips by norm only",
    ),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_config_that_contradicts_the_recipe_is_refused(name: str) -> None:
    config, options, message = CONTRADICTIONS[name]
    data = TextDataModule("rows.json", micro_batch_size=2)
    trainer = trainer_with("auto" if options.get("devices", 1) == 1 else "ddp", **options)
    with pytest.raises(RecipeError, match=message):
        check_recipe(config, trainer, data)


def test_a_config_that_agrees_is_taken_and_auto_is_the_recipe() -> None:
    config = {
        "train_batch_size": "auto",
        "gradient_accumulation_steps": 2,
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "overlap_comm": False},
    }
    strategy = DeepSpeedStrategy(config=config)
    trainer = trainer_with(strategy, accumulate_grad_batches=2)
    strategy.check(trainer, CausalLM("nowhere", peft=LORA), TextDataModule("rows.json"))
    assert strategy.config == {
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 3, "overlap_comm": False},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


REFUSED_ON_DEVICES: dict[str, tuple[dict[str, Any], int, str]] = {
    "nothing split": ({"stage": 0}, 1, "stage=0 splits nothing"),
    "quantized weights": ({"stage": 3, "zero_quantized_weights": True}, 1, "zero_quantized_weights .* are for CUDA"),
    "copies": (
        {"stage": 3, "zero_hpz_partition_size": 3},
        4,
        r"partition_size=3 must divide the 4 .*\[1, 2, 4\]",
    ),
    "nvme without stage 3": (
        {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"}},
        1,
        "offload_optimizer to nvme needs stage=3, but stage=2",
    ),
    "nvme, no folder": (
        {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/proc/nvme"}},
        1,
        "nvme_path='/proc/nvme' cannot be written to",
    ),
}


@pytest.mark.parametrize("name", REFUSED_ON_DEVICES)
def test_what_the_devices_cannot_do_is_refused(name: str) -> None:
    config, ranks, message = REFUSED_ON_DEVICES[name]
    with pytest.raises(RecipeError, match=message):
        trainer_with(DeepSpeedStrategy(config={"zero_optimization": config}), devices=ranks)


@pytest.mark.parametrize("precision", ["16-mixed", "16-true"])
def test_float16_is_refused_where_deepspeed_does_not_compute_in_it(
    monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    from deepspeed.accelerator import get_accelerator

    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: False)
    strategy = DeepSpeedStrategy(stage=2)
    trainer = trainer_with(strategy, precision=precision)
    with pytest.raises(RecipeError, match=f"precision={precision}, but DeepSpeed .* set bf16-{precision[3:]}$"):
        strategy.check(trainer, CausalLM("nowhere", peft=LORA), TextDataModule("rows.json"))


def test_nvme_without_its_library_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.accelerator import get_accelerator

    builder = type(get_accelerator().create_op_builder("AsyncIOBuilder"))
    monkeypatch.setattr(builder, "is_compatible", lambda *_, **__: False)
    offload = {"device": "nvme", "nvme_path": str(tmp_path / "new")}
    with pytest.raises(RecipeError, match="offload_param to nvme needs libaio"):
        trainer_with(DeepSpeedStrategy(config={"zero_optimization": {"stage": 3, "offload_param": offload}}))
    assert not (tmp_path / "new").exists()


def test_a_checkpoint_without_the_states_on_nvme_is_resumed() -> None:
    """It had no groups of weights either, and ended in a ``ValueError``."""
    order = [[torch.nn.Parameter(torch.zeros(3)) for _ in range(count)] for count in (2, 1)]

    def engine(rate: float, is_on_disk: bool) -> Any:
        optimizer = torch.optim.AdamW([{"params": own} for own in order], lr=rate)
        return SimpleNamespace(optimizer=SimpleNamespace(swap_optimizer=is_on_disk), basic_optimizer=optimizer)

    with pytest.warns(UserWarning, match="a run that resumes from the checkpoint starts them anew"):
        saved = zero_state.optimizer_state(engine(0.5, is_on_disk=True), order, keep=True)
    assert [group["params"] for group in saved["param_groups"]] == [[0, 1], [2]]
    assert saved["state"] == {}
    resumed = engine(0.1, is_on_disk=True)
    zero_state.load_optimizer_state(resumed, order, saved)
    assert [group["lr"] for group in resumed.basic_optimizer.param_groups] == [0.5, 0.5]
    assert not resumed.basic_optimizer.state


def test_added_tokens_that_train_beside_an_adapter_are_refused_at_stage_3() -> None:
    strategy = DeepSpeedStrategy(stage=3)
    with pytest.raises(
        RecipeError, match=r"trainable_token_indices=\['<a>'\] reads weights .* \(stage=3\); set stage to 2"
    ):
        strategy.check(trainer_with(strategy), CausalLM("nowhere", peft=LORA, added_tokens=["<a>"]))


class InfiniteGradient(Callback):
    """Makes the gradients of the second optimizer step infinite, and no loss."""

    def on_before_backward(self, trainer: Trainer, pl_module: Any, loss: torch.Tensor) -> None:
        if trainer.global_step == 1:
            next(iter(pl_module.trainable_parameters().values())).register_hook(lambda gradient: gradient * math.inf)


def fit_to_an_infinite_gradient(folder: str, stage: int) -> str:
    """What a run says that ends there."""
    trainer = trainer_with(zero(stage), devices=1, max_steps=3, callbacks=[InfiniteGradient()])
    with pytest.raises(NotFinite) as caught:
        trainer.fit(CausalLM(folder, peft=LORA), TextDataModule(f"{folder}/rows.json", max_length=96))
    return str(caught.value)


@pytest.mark.processes
@pytest.mark.parametrize("stage", [2, 3])
def test_a_step_that_deepspeed_skips_ends_the_run(folders: Any, stage: int) -> None:
    [said] = on_ranks(1, fit_to_an_infinite_gradient, folders(), stage, timeout=90)
    assert said.startswith("step 2: train/grad_norm is inf; ")


def save_after_a_validation(folder: str, stage: int) -> str:
    """What is said of a whole checkpoint; one of weights alone is written."""
    trainer = trainer_with(zero(stage), devices=1, max_steps=1)
    module, rows = CausalLM(folder, peft=LORA), f"{folder}/rows.json"
    data = TextDataModule(rows, val_path=rows, max_length=96)
    trainer.fit(module, data)
    trainer.validate(module, data, verbose=False)
    with pytest.raises(RecipeError) as caught:
        trainer.save_checkpoint(f"{folder}/all_{stage}.ckpt")
    trainer.save_checkpoint(f"{folder}/weights_{stage}.ckpt", weights_only=True)
    return str(caught.value)


@pytest.mark.processes
@pytest.mark.parametrize("stage", [2, 3])
def test_a_checkpoint_after_a_validation_has_no_optimizer(folders: Any, stage: int) -> None:
    [said] = on_ranks(1, save_after_a_validation, folders(), stage, timeout=90)
    assert said.endswith("call save_checkpoint before, or with weights_only=True")


def fit_and_compare_linear(folder: str) -> bool:
    before = torch.nn.functional.linear
    fit(folder, Case(partial(zero, 3)))
    return torch.nn.functional.linear is before


@pytest.mark.processes
def test_stage_3_leaves_torchs_linear_as_it_was(folders: Any) -> None:
    """It adds biases in place, so that a later run in the process with selective checkpointing would be wrong."""
    assert on_ranks(2, fit_and_compare_linear, folders(), timeout=90) == [True, True]


def fit_in_two_dtypes(folder: str, stage: int) -> str:
    """What a run says that trains routers in fp32 and the rest in bf16, or LoRA in fp32 beside norms in bf16."""
    beside = peft.LoraConfig(r=2, target_modules=["o_proj"], modules_to_save=["norm"], task_type="CAUSAL_LM")
    module = CausalLM(folder, peft=beside if stage == 3 else None, dtype="bfloat16")
    with pytest.raises(RecipeError) as caught:
        trainer_with(zero(stage), devices=1, max_steps=1).fit(
            module, TextDataModule(f"{folder}/rows.json", max_length=96)
        )
    return str(caught.value)


@pytest.mark.processes
@pytest.mark.parametrize(("stage", "advice"), [(2, "model.dtype=float32"), (3, "model.adapter_dtype=auto")])
def test_trained_weights_of_two_dtypes_are_refused(tmp_path: Path, write_rows: Any, stage: int, advice: str) -> None:
    folder = save_model("deepseek_v3", tmp_path, layers=2)
    write_rows(count=8)
    [said] = on_ranks(1, fit_in_two_dtypes, folder, stage, timeout=90)
    assert f"stage={stage} trains weights of one dtype, and here they are in torch.bfloat16 and torch.float32" in said
    assert f"set {advice} or trainer.precision=bf16-true" in said


def said_of_rounded_weights(folder: str, stage: int, precision: str, options: dict[str, Any]) -> list[str]:
    trainer = trainer_with(zero(stage), devices=1, max_steps=1, precision=precision)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = CausalLM(folder, dtype="bfloat16", **options)
        trainer.fit(module, TextDataModule(f"{folder}/rows.json", max_length=96))
    return [str(one.message) for one in caught if "in half precision" in str(one.message)]


ROUNDED: dict[str, tuple[int, str, dict[str, Any]]] = {
    "read in one dtype": (3, "32-true", {}),
    "trained in one dtype": (2, "bf16-mixed", {}),
    "read in one dtype, LoRA": (3, "bf16-true", {"peft": LORA}),
}


@pytest.mark.processes
@pytest.mark.parametrize("name", ROUNDED)
def test_weights_that_are_rounded_are_named(tmp_path: Path, write_rows: Any, folders: Any, name: str) -> None:
    folder = save_model("deepseek_v3", tmp_path, layers=2)
    write_rows(count=8)
    [[said]] = on_ranks(1, said_of_rounded_weights, folder, *ROUNDED[name], timeout=90)
    assert said.startswith("weights that transformers keeps in float32 are in half precision (1: model.layers.1.mlp.")
    assert on_ranks(1, said_of_rounded_weights, folders(), *ROUNDED[name], timeout=90) == [[]]


def routers_of_lora(folder: str, precision: str) -> tuple[list[str], Tensor]:
    trainer = trainer_with(zero(2), devices=1, max_steps=1, precision=precision)
    module = CausalLM(folder, dtype="bfloat16", peft=LORA)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, TextDataModule(f"{folder}/rows.json", max_length=96))
    said = [str(one.message) for one in caught if "in half precision" in str(one.message)]
    return said, module._packed.base.get_parameter("model.layers.1.mlp.gate.weight")


@pytest.mark.processes
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_frozen_routers_stay_in_float32_before_stage_3(tmp_path: Path, write_rows: Any, precision: str) -> None:
    folder = save_model("deepseek_v3", tmp_path, layers=2)
    write_rows(count=8)
    [(said, router)] = on_ranks(1, routers_of_lora, folder, precision, timeout=90)
    assert said == []
    assert torch.equal(router, load_file(f"{folder}/model.safetensors")["model.layers.1.mlp.gate.weight"])


def test_selective_checkpointing_is_refused_at_stage_3() -> None:
    strategy = DeepSpeedStrategy(stage=3)
    with pytest.raises(RecipeError, match=r"biases in place \(stage=3\), and gradients would be wrong; set it to true"):
        strategy.check(trainer_with(strategy), CausalLM("nowhere", gradient_checkpointing="selective"))


def test_arguments_beside_a_config_are_refused() -> None:
    with pytest.raises(RecipeError, match="there is also stage=3, offload_optimizer=True; say it in config"):
        DeepSpeedStrategy(stage=3, offload_optimizer=True, config={"zero_optimization": {"stage": 2}})


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lit_ft.strategies.zero.config.find_spec", lambda name: None if name == "deepspeed" else name)
    with pytest.raises(RecipeError, match="needs deepspeed, which is not installed; pip install deepspeed"):
        DeepSpeedStrategy()


@pytest.mark.slow
def test_the_command_line_says_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    config = tmp_path / "deepspeed.json"
    config.write_text(json.dumps({"zero_optimization": {"stage": 3}, "gradient_accumulation_steps": 8}))
    recipe = ["--config", "recipes/quickstart.yaml", "--trainer.devices", "2", "--run_dir", str(tmp_path / "run")]
    strategy = ["--trainer.strategy", "lit_ft.strategies.DeepSpeedStrategy", "--trainer.strategy.config", str(config)]

    def said(*options: str) -> str:
        with pytest.raises(SystemExit) as stop:
            main(["fit", *recipe, *strategy, *options])
        assert stop.value.code == 2
        return capsys.readouterr().err

    assert "gradient_accumulation_steps=8, but trainer.accumulate_grad_batches=1; take" in said()
    assert "config takes the place of all other settings, but there is also stage=3;" in said(
        "--trainer.strategy.stage=3"
    )
    config.write_text("{")
    assert f"config='{config}' is no file of DeepSpeed's JSON (Expecting property name" in said()
    config.unlink()
    assert "the path does not exist" in said()
    assert "unknown option 'stag'; did you mean 'stage'?" in said("--trainer.strategy.stag=3")
