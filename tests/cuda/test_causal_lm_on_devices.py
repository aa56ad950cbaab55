"""Losses, gradients and resumed runs on a device, against references on a CPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import here
from devices import CUDA, DEVICES, TINY, Calls, WithoutWaiting, accelerator_of, on, relative_distance
from lightning.pytorch.callbacks import ModelCheckpoint
from one_process import Losses
from peft import LoraConfig, get_peft_model_state_dict, set_peft_model_state_dict
from quantized_checkpoints import dense_of, give_adapter
from transformers import AutoConfig, BitsAndBytesConfig, Qwen2Config, Qwen2ForCausalLM

from lit_ft import CausalLM, TextDataModule
from lit_ft.internals.torch import FLOAT8_ON_CPU
from lit_ft.model.loading import load_base
from lit_ft.packed_batch import PackedBatch, pack_samples
from lit_ft.training.precision import float8_product

pytestmark = pytest.mark.slow

LAYERS = AutoConfig.from_pretrained(TINY).num_hidden_layers
TEXTS = (
    "the cup is red",
    "a book under the lamp was blue and green",
    "red green blue " * 20,
    "the lamp is beside the cup",
)


def lora(dropout: float = 0.0) -> LoraConfig:
    method = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "lora_dropout": dropout}
    return LoraConfig(**method, task_type="CAUSAL_LM", init_lora_weights=False)


def ids_of(folder: str = TINY) -> list[Any]:
    tokenizer = CausalLM(folder).tokenizer
    return [tokenizer(text, return_tensors="np")["input_ids"][0] for text in TEXTS]


def row_of(samples: list[Any]) -> PackedBatch:
    return pack_samples([(ids, ids) for ids in samples])


def built(device: str, folder: str = TINY, dropout: float = 0.0, **options: Any) -> CausalLM:
    """A model as a run builds it: in the context of the device; with one adapter whatever the device."""
    torch.manual_seed(0)
    module = CausalLM(folder, peft=lora(dropout), **options)
    with torch.device(device):
        module.configure_model()
    return module.to(device).train()


@pytest.fixture(scope="module")
def reference() -> CausalLM:
    """fp32 on the CPU."""
    return built("cpu", dtype="float32")


def gradients(module: CausalLM) -> torch.Tensor:
    return torch.cat([p.grad.float().cpu().flatten() for _, p in sorted(module.trainable_parameters().items())])


def passed(module: CausalLM, device: str, rows: list[PackedBatch]) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses of all tokens and gradients of all adapters."""
    module.zero_grad()
    losses = []
    for row in rows:
        result = module(on(device, row))
        result.loss_sum.backward()
        losses.append(result.per_token.detach().float().cpu())
    return torch.cat(losses), gradients(module)


def alike(device: str, reference: CausalLM, **options: Any) -> CausalLM:
    """A model with the adapter of the reference."""
    module = built(device, **options)
    give_adapter(module, reference)
    return module


@pytest.mark.parametrize("device", DEVICES)
def test_fp32_is_what_transformers_computes_of_each_sample(device: str, reference: CausalLM) -> None:
    samples = ids_of()
    losses, gradient = passed(alike(device, reference, dtype="float32"), device, [row_of(samples)])
    base = built("cpu", dtype="float32").model
    set_peft_model_state_dict(base, get_peft_model_state_dict(reference.model))
    base.set_attn_implementation("sdpa")
    wanted = []
    for ids in samples:
        logits = base(input_ids=torch.from_numpy(ids)[None], use_cache=False).logits[0, :-1]
        wanted.append(torch.nn.functional.cross_entropy(logits, torch.from_numpy(ids)[1:], reduction="none"))
    torch.cat(wanted).sum().backward()
    trained = sorted((name, p) for name, p in base.named_parameters() if p.requires_grad)
    assert relative_distance(losses, torch.cat(wanted)) < 1e-5
    assert relative_distance(gradient, torch.cat([p.grad.flatten() for _, p in trained])) < 1e-4


@pytest.mark.parametrize("device", DEVICES)
def test_bf16_is_fp32_but_for_rounding(device: str, reference: CausalLM) -> None:
    row = [row_of(ids_of())]
    losses, gradient = passed(alike(device, reference, dtype="bfloat16"), device, row)
    wanted, gradient_wanted = passed(reference, "cpu", row)
    assert abs(losses.mean() / wanted.mean() - 1) < 5e-3
    assert relative_distance(gradient, gradient_wanted) < 3e-2
    assert torch.cosine_similarity(gradient, gradient_wanted, dim=0) > 0.999


@pytest.mark.parametrize("device", DEVICES)
def test_samples_are_split_over_rows_in_any_way(device: str, reference: CausalLM) -> None:
    module, samples = alike(device, reference, dtype="float32"), ids_of()
    losses, gradient = passed(module, device, [row_of(samples)])
    split = passed(module, device, [row_of(samples[:1]), row_of(samples[1:])])
    assert relative_distance(split[0], losses) < 1e-5
    assert relative_distance(split[1], gradient) < 1e-5


WAYS: dict[str, dict[str, Any]] = {
    "checkpointing": {"gradient_checkpointing": True},
    "selective": {"gradient_checkpointing": "selective"},
    "offload": {"gradient_checkpointing": True, "activation_offload": True},
}
ON_CUDA: dict[str, dict[str, Any]] = {
    "compiled": {"compile": True},
    "compiled, checkpointing": {"compile": True, "gradient_checkpointing": True},
    "liger": {"liger": True},
}
"""tests/benchmarks/test_speed.py and tests/model/test_compiled_layers.py compile on a CPU."""


@pytest.mark.parametrize(
    ("device", "options"),
    [pytest.param("cpu", options, id=f"cpu-{name}") for name, options in WAYS.items()]
    + [pytest.param("cuda", o, id=f"cuda-{n}", marks=pytest.mark.cuda) for n, o in (WAYS | ON_CUDA).items()],
)
def test_ways_to_save_time_or_memory_change_no_number(
    device: str, options: dict[str, Any], reference: CausalLM
) -> None:
    if "liger" in options:
        pytest.importorskip("liger_kernel")
    rows = [row_of(ids_of())]
    wanted, gradient_wanted = passed(alike(device, reference, dtype="bfloat16"), device, rows)
    module = alike(device, reference, dtype="bfloat16", **options)
    losses, gradient = passed(module, device, rows)
    assert relative_distance(losses, wanted) < 5e-3
    assert relative_distance(gradient, gradient_wanted) < 2e-2
    if "compile" not in options:
        return
    torch.compiler.set_stance("fail_on_recompile")
    try:
        passed(module, device, [row_of([ids[1:] for ids in ids_of()])])  # of another length
    finally:
        torch.compiler.set_stance("default")


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize(
    "options",
    [{}, {"compile": True}, {"quantization": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")}],
    ids=["eager", "compiled", "nf4"],
)
def test_replayed_graphs_change_no_number(device: str, options: dict[str, Any], reference: CausalLM) -> None:
    graphs = {"cuda_graphs": True, "pad_rows_to": 128}
    plain, recorded = (alike(device, reference, dtype="bfloat16", **options, **more) for more in ({}, graphs))
    rows = [row_of([ids[n:] for ids in ids_of()]) for n in range(3)]  # as it is, recorded, and replayed
    for step in ([rows[0]], [rows[1]], [rows[2]], rows):
        wanted, found = passed(plain, device, step), passed(recorded, device, step)
        assert relative_distance(found[0], wanted[0]) < 5e-3
        assert relative_distance(found[1], wanted[1]) < 2e-2


@pytest.mark.parametrize("device", [CUDA])
def test_replayed_graphs_draw_the_numbers_of_the_seed(device: str, reference: CausalLM) -> None:
    module = alike(device, reference, dtype="bfloat16", dropout=0.3, cuda_graphs=True, pad_rows_to=128)
    losses = []
    for seed in (1, 1, 1, 2, 1):  # as it is, recorded, and replayed
        torch.manual_seed(seed)
        losses.append(passed(module, device, [row_of(ids_of())])[0])
    assert all(torch.equal(losses[0], losses[n]) for n in (1, 2, 4))
    assert not torch.equal(losses[0], losses[3])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("way", "per_layer"), [(None, 1), ("checkpointing", 2), ("selective", 1), ("offload", 2)])
def test_checkpointing_recomputes_attention_unless_it_is_selective(
    device: str, way: str | None, per_layer: int, reference: CausalLM
) -> None:
    module = built(device, dtype="bfloat16", **(WAYS[way] if way else {}))
    row = row_of(ids_of())
    with Calls() as calls:
        passed(module, device, [row])
    segments = 1 if device == "cuda" else len(TEXTS)
    kernel = "_varlen_attn" if device == "cuda" else "scaled_dot_product"
    assert calls.count(kernel) == per_layer * LAYERS * segments


@pytest.mark.parametrize("device", [CUDA])
def test_offloaded_activations_leave_the_device(device: str, reference: CausalLM) -> None:
    """The inputs of all layers but the last; the last two tensors that are saved stay."""
    row = row_of(ids_of() * 20)

    def held(way: str) -> int:
        """Bytes that a forward pass keeps for its backward pass."""
        module = alike(device, reference, dtype="bfloat16", **WAYS[way])
        passed(module, device, [row])  # what is allocated once
        batch = on(device, row)
        before = torch.cuda.memory_allocated()
        result = module(batch)
        after = torch.cuda.memory_allocated()
        result.loss_sum.backward()
        return after - before

    inputs = row["input_ids"].numel() * reference.base_model.config.hidden_size * torch.bfloat16.itemsize
    assert held("checkpointing") - held("offload") >= (LAYERS - 1) * inputs


@pytest.mark.parametrize("device", DEVICES)
def test_a_warm_step_does_not_wait_for_the_device(
    device: str, make_trainer: Any, model_folder: str, write_rows: Any
) -> None:
    follow = WithoutWaiting(device)
    trainer = make_trainer(accelerator=accelerator_of(device), max_steps=4, log_every_n_steps=50, callbacks=[follow])
    trainer.fit(CausalLM(model_folder, peft=lora(), dtype="bfloat16"), TextDataModule(write_rows(), micro_batch_size=4))
    assert follow.steps == 4


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_resumed_run_is_bit_equal_where_it_is_deterministic(
    device: str, dtype: str, make_trainer: Any, model_folder: str, write_rows: Any, tmp_path: Path
) -> None:
    """On CUDA ``trainer.deterministic`` is needed: flash attention adds its gradients in any order otherwise."""
    data = write_rows()

    def fit(steps: int, folder: Path, resume: Path | None = None) -> CausalLM:
        module = CausalLM(model_folder, peft=lora(), dtype=dtype)
        trainer = make_trainer(
            accelerator=accelerator_of(device),
            deterministic=True,
            max_steps=steps,
            enable_checkpointing=True,
            callbacks=[ModelCheckpoint(folder, save_last=True, every_n_train_steps=3)],
        )
        trainer.fit(module, TextDataModule(data, micro_batch_size=4), ckpt_path=resume and str(resume))
        return module

    whole = fit(6, tmp_path / "whole")
    fit(3, tmp_path / "half")
    resumed = fit(6, tmp_path / "rest", tmp_path / "half" / "last.ckpt")
    torch.use_deterministic_algorithms(False)
    for name, parameter in whole.trainable_parameters().items():
        assert torch.equal(resumed.trainable_parameters()[name], parameter), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_bf16_runs_reach_the_kernel_for_several_samples(
    device: str, precision: Any, make_trainer: Any, write_rows: Any
) -> None:
    module = CausalLM(TINY, peft=lora(), dtype="bfloat16" if precision == "32-true" else "float32")
    trainer = make_trainer(accelerator=accelerator_of(device), precision=precision, max_steps=1)
    with Calls() as calls:
        trainer.fit(module, TextDataModule(write_rows(), micro_batch_size=4))
    varlen, by_segment = calls.count("_varlen_attn"), calls.count("scaled_dot_product")
    assert (varlen, by_segment) == ((LAYERS, 0) if device == "cuda" else (0, 4 * LAYERS))


FOUR_BIT = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("scheme", "tolerance"), [(FOUR_BIT, 1e-3), ({"load_in_8bit": True}, 5e-2)], ids=["nf4", "int8"]
)
def test_a_quantized_base_trains_as_the_dense_weights_that_it_stands_for(
    device: str, scheme: dict[str, Any], tolerance: float, make_trainer: Any, write_rows: Any, tmp_path: Path
) -> None:
    """Built by the trainer, so in the context of the device. LLM.int8 rounds activations too, on CUDA."""
    quantization, data = BitsAndBytesConfig(**scheme), write_rows()
    dense = dense_of(TINY, quantization, tmp_path / "dense", tokenizer=CausalLM(TINY).tokenizer)

    def losses(folder: str, **options: Any) -> list[float]:
        record = Losses()
        torch.manual_seed(0)
        module = CausalLM(folder, peft=lora(), dtype="float32", **options)
        make_trainer(accelerator=accelerator_of(device), max_steps=10, callbacks=[record]).fit(
            module, TextDataModule(data, micro_batch_size=4, shuffle=False)
        )
        return record.losses

    got, wanted = losses(TINY, quantization=quantization), losses(dense)
    assert len(wanted) == 10
    assert got == pytest.approx(wanted, abs=tolerance)


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("scheme", [FOUR_BIT, {"load_in_8bit": True}], ids=["nf4", "int8"])
def test_reading_a_quantized_base_takes_its_memory_and_that_of_a_weight(
    device: str, scheme: dict[str, Any], tmp_path: Path
) -> None:
    """tests/model/test_quantization_devices.py has the order of events on a CPU."""
    tokenizer = CausalLM(TINY).tokenizer
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4, "vocab_size": len(tokenizer)}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "dtype": "float32", "tie_word_embeddings": True}
    Qwen2ForCausalLM(Qwen2Config(**sizes, **heads)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.device(device, 0):
        base = load_base(str(tmp_path), quantization=BitsAndBytesConfig(**scheme))
    held, peak = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
    assert {parameter.device.type for parameter in base.parameters()} == {device}
    assert peak < held + 3 * 4 * 1024 * 4096  # of 268 MB that the dense weights are, 17 are the largest of them


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_float8_products_are_near_those_in_fp32(device: str, scaling: Any) -> None:
    if device == "cpu" and not FLOAT8_ON_CPU:
        pytest.skip("torch 2.11 has these products on CUDA alone")
    draw = torch.Generator().manual_seed(0)
    left, right = (torch.randn(rows, 64, generator=draw) for rows in (32, 48))
    got = float8_product(left.to(device, torch.bfloat16), right.to(device, torch.bfloat16), scaling, is_forward=True)
    assert relative_distance(got, left @ right.T) < 5e-2


@pytest.mark.parametrize("device", [CUDA])
def test_the_quickstart_learns_its_facts(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/commands runs it on a CPU."""
    monkeypatch.chdir(Path(TINY).parents[1])
    run = tmp_path / "run"
    recipe = ["--config", "recipes/quickstart.yaml", "--run_dir", str(run)]
    here(monkeypatch, "fit", *recipe, "--trainer.accelerator", accelerator_of(device))
    scores = [line for line in (run / "metrics.csv").read_text().splitlines() if line]
    column = scores[0].split(",").index("val/exact_match")
    assert float([cells for line in scores[1:] if (cells := line.split(",")[column])][-1]) >= 0.9
