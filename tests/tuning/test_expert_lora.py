"""LoRA on fused experts computes what PEFT computes, under every strategy, and its merge loses no expert."""

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import save_model
from compared_strategies import Record, adamw, assert_same, load_whole, sgd
from lit_callbacks import AdapterMerger
from lit_callbacks.distributed.gather import full_weights
from lit_callbacks.export.merge_check import MergeFailed, compare
from lit_callbacks.export.merging import save_merged
from peft import LoraConfig, PeftModel
from peft.tuners.lora import LoraModel, ParamWrapper
from ranks import LiveRanks
from shared_fixtures import make_rows
from transformers import AutoModelForCausalLM

from lit_ft import CausalLM, TextDataModule
from lit_ft.packed_batch import PackedBatch, as_packed_batch
from lit_ft.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from lit_ft.tuning.lora.expert_lora import FusedExperts, bytes_of_sums, wrapped_parameters

ARCHITECTURES = ("mixtral", "qwen3_moe", "gpt_oss", "olmoe", "deepseek_v3")

EXPERTS = {"target_modules": ["o_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
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
MERGED = ("fsdp", "experts, shared by two ranks")
IN_CONTEXT = ("context", "pipeline")


def fit(make_trainer: Any, folder: str, data: str, strategy: str | None, **options: Any) -> Any:
    """Losses and gradient norms of three steps over eight rows each, and the final weights."""
    os.environ |= {"PL_GLOBAL_SEED": "3", "DS_ACCELERATOR": "cpu"}
    world, make = (1, lambda: "auto") if strategy is None else STRATEGIES[strategy]
    replicas = 1 if strategy in IN_CONTEXT else world
    record = Record(None, None)
    out = Path(data).parent / str(strategy)
    merger = [AdapterMerger(out / "adapter", out / "merged")] if strategy in (None, *MERGED) else []
    trainer = make_trainer(
        max_steps=3,
        devices=world,
        strategy=make(),
        accumulate_grad_batches=4 // replicas,
        callbacks=[record, *merger],
        use_distributed_sampler=False,
    )
    module = CausalLM(folder, **{"peft": LORA, "optimizer": sgd, **options})
    trainer.fit(module, TextDataModule(data, micro_batch_size=2, max_length=96))
    gather = getattr(trainer.strategy, "full_weights", full_weights)
    return record.steps, gather(module, lambda _, p: p.requires_grad)


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
    mixtral: str,
    kept: dict[str, Any],
    strategy: str,
) -> None:
    data = write_rows(make_rows(22))
    if "one" not in kept:
        kept["one"] = fit(make_trainer, mixtral, data, None)
        kept["merged"] = load_whole(Path(data).parent / "None" / "merged")
    wanted, weights = kept["one"]
    assert sum("experts" in name for name in weights) == 16  # A and B of two tensors in each of four layers
    for steps, found in live_ranks(STRATEGIES[strategy][0], fit, make_trainer, mixtral, data, strategy):
        is_whole = found.keys() == weights.keys()  # a pipeline's stages send theirs to rank 0
        assert_same(steps, found if is_whole else weights, wanted, weights, 1e-5, strategy)
    if strategy in MERGED:
        merged = load_whole(Path(data).parent / strategy / "merged")
        assert merged.keys() == kept["merged"].keys() == load_whole(Path(mixtral)).keys()
        for name, weight in kept["merged"].items():
            torch.testing.assert_close(merged[name], weight, atol=1e-5, rtol=1e-5, msg=name)


# --- one process ---------------------------------------------------------------------------------------


def module_of(folder: str, **options: Any) -> CausalLM:
    """Module whose adapter has random matrices, those of PEFT's init apart."""
    torch.manual_seed(1)
    module = CausalLM(folder, **{"peft": LORA, "optimizer": sgd, **options})
    module.configure_model()
    for name, parameter in module.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return module


def gradients(module: CausalLM, batches: list[PackedBatch]) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss of some batches and gradients of it."""
    module.zero_grad()
    total = torch.stack([module(batch).loss_sum for batch in batches]).sum()
    total.backward()
    return float(total), {name: p.grad.clone() for name, p in module.trainable_parameters().items()}  # type: ignore[union-attr]


def packed(lengths: list[int]) -> tuple[PackedBatch, list[PackedBatch]]:
    """A packed batch of random samples, and the samples one by one."""
    generator = torch.Generator().manual_seed(0)
    samples = [torch.randint(0, 380, (length,), generator=generator) for length in lengths]
    rows = [as_packed_batch({"input_ids": ids[None], "labels": ids[None]}) for ids in samples]
    padded = torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(ids) for ids in samples], batch_first=True)
    labels = torch.where(mask.bool(), padded, -100)
    return as_packed_batch({"input_ids": padded, "attention_mask": mask, "labels": labels}), rows


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_packed_row_is_its_samples_one_by_one_and_what_peft_computes(
    folder_of: Callable[[str], str], architecture: str
) -> None:
    together, one_by_one = packed([9, 17, 5])
    module = module_of(folder_of(architecture))
    layers = 3 if architecture == "deepseek_v3" else 4  # its first is dense
    assert sum(isinstance(part, FusedExperts) for part in module.modules()) == layers
    loss, found = gradients(module, [together])
    assert sum("experts" in name for name in found) == 4 * layers  # A and B of two tensors
    others = {
        "one by one": (module, one_by_one),
        "recomputed": (module_of(folder_of(architecture), gradient_checkpointing=True), [together]),
        "selective": (module_of(folder_of(architecture), gradient_checkpointing="selective"), [together]),
        "PEFT": (module_of(folder_of(architecture), fused_lora=False), [together]),
    }
    for what, (other, batches) in others.items():
        wanted_loss, wanted = gradients(other, batches)
        assert loss == pytest.approx(wanted_loss, rel=1e-6), what
        for name, gradient in wanted.items():
            difference = float((found[name] - gradient).abs().max() / gradient.abs().max())
            assert difference < 5e-6, f"{what} {name}: {difference:.1e}"


@pytest.mark.slow
def test_in_bfloat16_rounding_is_less_than_peft_s(folder_of: Callable[[str], str]) -> None:
    module = module_of(folder_of("mixtral"), dtype="bfloat16")
    left_to_peft = module_of(folder_of("mixtral"), dtype="bfloat16", fused_lora=False)
    experts, by_peft = (next(p for p in m.modules() if isinstance(p, ParamWrapper)) for m in (module, left_to_peft))
    x = torch.randn(64, 48, dtype=torch.bfloat16)
    index, weights = torch.arange(128).view(64, 2) % 4, torch.full((64, 2), 0.5, dtype=torch.bfloat16)
    with torch.no_grad():
        for part in (experts, by_peft):
            for layer in wrapped_parameters(part):
                layer.lora_B["default"].weight.mul_(1e-3)
            part.float()
        inputs = x.float(), index, weights.float()
        exact = experts(*inputs) - experts.get_base_layer()(*inputs)
        for part in (experts, by_peft):
            part.bfloat16()
        plain = experts.get_base_layer()(x, index, weights)
        beside, added = ((part(x, index, weights) - plain).float() for part in (experts, by_peft))
    assert (beside - exact).norm() < (added - exact).norm()


def test_without_its_adapter_a_part_of_the_experts_computes_what_the_base_does(folder_of: Callable[[str], str]) -> None:
    module = module_of(folder_of("mixtral"))
    experts = next(part for part in module.modules() if isinstance(part, FusedExperts))
    inputs = torch.randn(64, 48), torch.arange(128).view(64, 2) % 4, torch.full((64, 2), 0.5)
    assert module.model is not None
    with torch.no_grad():
        base = experts.get_base_layer()(*inputs)
        assert (experts.outputs(*inputs) - base).abs().max() > 1e-3
        with module.model.disable_adapter():
            torch.testing.assert_close(experts.outputs(*inputs), base)


def test_no_copy_of_the_experts_is_kept_for_the_backward_pass(folder_of: Callable[[str], str]) -> None:
    together, _ = packed([9, 17, 5])

    def copies(module: CausalLM) -> int:
        """Bytes of saved tensors as large as all experts of a layer, parameters apart."""
        weights = {p.data_ptr() for p in module.parameters()}
        shapes = {p.shape for p in module.parameters() if p.ndim == 3}
        kept: dict[int, int] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.data_ptr() not in weights and {tensor.shape, tensor.mT.shape if tensor.ndim > 1 else ()} & shapes:
                kept[tensor.data_ptr()] = tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            module(together).loss_sum.backward()
        return sum(kept.values())

    by_peft = module_of(folder_of("mixtral"), fused_lora=False)
    assert copies(module_of(folder_of("mixtral"))) == 0
    assert copies(by_peft) == bytes_of_sums(by_peft, is_fused=False) > 0
    assert bytes_of_sums(by_peft, is_fused=True) == 0


# --- saved, resumed, merged ----------------------------------------------------------------------------


def logits_of(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(3, 60)[None]).logits


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_saved_resumed_and_merged(
    make_trainer: Any, write_rows: Any, folder_of: Callable[[str], str], tmp_path: Path, architecture: str
) -> None:
    folder, data = folder_of(architecture), write_rows(make_rows(12))
    targets = {**EXPERTS, "target_modules": "all-linear"}

    def trained(steps: int, resume: str | None = None) -> CausalLM:
        os.environ["PL_GLOBAL_SEED"] = "3"
        module = CausalLM(folder, peft=LoraConfig(r=4, lora_alpha=16, **targets), optimizer=adamw)
        out = tmp_path / str(steps)
        trainer = make_trainer(max_steps=steps, callbacks=[AdapterMerger(out / "adapter", out / "merged")])
        trainer.fit(module, TextDataModule(data, micro_batch_size=2, max_length=96), ckpt_path=resume)
        trainer.save_checkpoint(out / "last.ckpt")
        return module

    trained(2)
    resumed, module = trained(4, str(tmp_path / "2" / "last.ckpt")), trained(4)
    for name, parameter in resumed.trainable_parameters().items():
        assert torch.equal(parameter, module.trainable_parameters()[name]), name
    assert any("experts" in name for name in resumed.trainable_parameters())
    module.base_model.set_attn_implementation("eager")
    wanted = logits_of(module.base_model)
    base = AutoModelForCausalLM.from_pretrained(folder)
    assert (logits_of(base) - wanted).abs().max() > 1e-2
    adapted = PeftModel.from_pretrained(base, tmp_path / "4" / "adapter")
    torch.testing.assert_close(logits_of(adapted), wanted, atol=1e-5, rtol=1e-5)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "4" / "merged")
    torch.testing.assert_close(logits_of(merged), wanted, atol=1e-5, rtol=1e-5)
    assert load_whole(tmp_path / "4" / "merged").keys() == load_whole(Path(folder)).keys()


def test_a_merge_that_loses_an_expert_is_refused(
    folder_of: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = module_of(folder_of("gpt_oss")).model
    for name, parameter in model.named_parameters():
        if name.endswith("layers.2.mlp.router.bias"):
            parameter.data[3] = -100.0  # no prompt reaches this expert
    lost = "model.layers.2.mlp.experts.down_proj"
    unmerged = model.get_parameter("base_model.model.model.layers.2.mlp.experts.base_layer.base_layer.down_proj")

    def losing(self: PeftModel, **options: Any) -> torch.nn.Module:
        merged = merge(self, **options)
        merged.get_parameter(lost).data[3] = unmerged[3]
        return merged

    merge = LoraModel.merge_and_unload
    save_merged(model, tmp_path / "whole")
    monkeypatch.setattr(LoraModel, "merge_and_unload", losing)
    with pytest.raises(MergeFailed, match=rf"wrong: expert 3 of {lost} lacks what was trained; nothing was written"):
        save_merged(model, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_in_bfloat16_a_router_may_choose_another_expert_for_some_tokens(
    folder_of: Callable[[str], str], tmp_path: Path
) -> None:
    save_merged(module_of(folder_of("qwen3_moe"), dtype="bfloat16").model, tmp_path / "merged")
    logits = torch.randn(20, 8)
    other = logits.clone()
    other[3] += 1
    assert compare(logits, other, 1e-2, share=0.9).largest_difference == 0
    with pytest.raises(MergeFailed):
        compare(logits, other, 1e-2)
    other[5:8] += 1
    with pytest.raises(MergeFailed, match=r"at 90% of the positions"):
        compare(logits, other, 1e-2, share=0.9)
