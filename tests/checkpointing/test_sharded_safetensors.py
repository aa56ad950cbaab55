"""Models that ranks write together: every tensor is in the folder, persistent buffers included."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lit_callbacks import AdapterMerger
from lit_callbacks.distributed.gather import persistent_buffers
from lit_callbacks.export.merge_check import MergeFailed
from lit_callbacks.export.merging import save_merged, unsplit
from peft import LoraConfig, get_peft_model
from ranks import on_ranks
from safetensors.torch import load_file, save_file
from shared_fixtures import make_tokenizer
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from lit_ft import CausalLM, TextDataModule
from lit_ft.checkpointing.storage.sharded_safetensors import check_complete
from lit_ft.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy

pytestmark = pytest.mark.processes

BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
"""A persistent buffer: the routers of DeepSeek-V3 choose experts by it."""

STRATEGIES: dict[str, Callable[[], Any]] = {
    "one process": lambda: "auto",
    "fsdp": FSDPStrategy,
    "tensor": lambda: ModelParallelStrategy(tensor_parallel_size=2),
    "pipeline": lambda: ModelParallelStrategy(pipeline_parallel_size=2),
    "zero3": lambda: DeepSpeedStrategy(stage=3),
}
WAYS: dict[str, dict[str, Any]] = {"LoRA": {"peft": LoraConfig(r=2, target_modules=["q_b_proj", "o_proj"])}, "full": {}}


def deepseek(folder: Path, dtype: str) -> str:
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=384,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        first_k_dense_replace=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        max_position_embeddings=256,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        dtype=dtype,
    )
    model = DeepseekV3ForCausalLM(config).to(getattr(torch, dtype))
    model.get_buffer(BIAS).data = torch.linspace(-1, 1, 4)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def fit_and_write(make_trainer: Any, folder: str, data: str, out: Path, strategy: str) -> None:
    """One step that changes nothing, so that ranks write exactly what one process does."""
    os.environ["PL_GLOBAL_SEED"] = "3"
    for way, model in WAYS.items():
        module = CausalLM(folder, **model, optimizer=lambda p: torch.optim.SGD(p, lr=0.0))
        trainer = make_trainer(
            max_steps=1,
            devices=1 if strategy == "one process" else 2,
            strategy=STRATEGIES[strategy](),
            use_distributed_sampler=False,
            callbacks=[AdapterMerger(out / way / "adapter", out / way / "merged")],
        )
        trainer.fit(module, TextDataModule(data, micro_batch_size=2))


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


@pytest.mark.parametrize(
    ("strategy", "dtype"),
    [
        ("fsdp", "float32"),
        ("fsdp", "bfloat16"),
        ("pipeline", "float32"),
        ("tensor", "float32"),
        ("zero3", "float32"),
    ],
)
def test_folders_of_split_models_are_those_of_one_process_bit_for_bit(
    make_trainer: Any, write_rows: Any, tmp_path: Path, strategy: str, dtype: str
) -> None:
    data, model = write_rows(count=8), deepseek(tmp_path / "model", dtype)
    on_ranks(1, fit_and_write, make_trainer, model, data, tmp_path / "one", "one process", timeout=100)
    on_ranks(2, fit_and_write, make_trainer, model, data, tmp_path / "split", strategy, timeout=100)
    published = tensors(Path(model))
    for folder in ("LoRA/adapter", "LoRA/merged", "full/merged"):
        wanted, got = tensors(tmp_path / "one" / folder), tensors(tmp_path / "split" / folder)
        assert got.keys() == wanted.keys()
        assert got.keys() == published.keys() or folder == "LoRA/adapter"
        for name, tensor in wanted.items():
            assert got[name].dtype == tensor.dtype, name
            assert torch.equal(got[name], tensor), name
    again = DeepseekV3ForCausalLM.from_pretrained(tmp_path / "split" / "full" / "merged")
    assert torch.equal(again.get_buffer(BIAS), torch.linspace(-1, 1, 4))
    assert [name for name, _ in persistent_buffers(again)] == [BIAS]


def test_a_buffer_that_is_lost_or_changed_on_the_way_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = DeepseekV3ForCausalLM.from_pretrained(deepseek(tmp_path / "model", "float32"))

    def parameters_alone(module: Any, *_: Any, **__: Any) -> dict[str, torch.Tensor]:
        return {name: weight.detach() for name, weight in module.named_parameters(remove_duplicate=False)}

    with pytest.raises(MergeFailed, match=f"{BIAS} of the base are on no rank"):
        unsplit(model, keep=True, gather=parameters_alone)
    with pytest.raises(MergeFailed, match=f"no rank writes {BIAS}"):
        check_complete(model, set(parameters_alone(model)))

    adapted, save = get_peft_model(model, WAYS["LoRA"]["peft"]), DeepseekV3ForCausalLM.save_pretrained
    for change, what in ((lambda t: t.pop(BIAS), "is missing"), (lambda t: t[BIAS].add_(0.1), "has other values")):

        def save_and_change(self: Any, folder: Path, change: Any = change) -> None:
            save(self, folder)
            held = tensors(folder)
            change(held)
            save_file(held, folder / "model.safetensors", {"format": "pt"})

        monkeypatch.setattr(DeepseekV3ForCausalLM, "save_pretrained", save_and_change)
        with pytest.raises(MergeFailed, match=f"{BIAS} {what}"):
            save_merged(adapted, tmp_path / "merged")
        assert not (tmp_path / "merged").exists()


def test_a_buffer_keeps_its_dtype_in_a_narrower_merge(tmp_path: Path) -> None:
    model = DeepseekV3ForCausalLM.from_pretrained(deepseek(tmp_path / "model", "float32"))
    for way in ("full", "LoRA"):
        trained = get_peft_model(model, WAYS["LoRA"]["peft"]) if way == "LoRA" else model
        save_merged(trained, tmp_path / "merged", dtype=torch.bfloat16)
        saved = tensors(tmp_path / "merged")
        assert torch.equal(saved.pop(BIAS), torch.linspace(-1, 1, 4))
        kept = re.compile("|".join(model._keep_in_fp32_modules_strict))  # from transformers 5.24 on, the routers too
        for name, tensor in saved.items():
            assert tensor.dtype == (torch.float32 if kept.search(name) else torch.bfloat16), name


class ChangeBuffer(Callback):
    """Moves the router's bias after each step, as DeepSeek's balancing without a loss does."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        pl_module.base_model.get_buffer(BIAS).add_(0.01)


@pytest.mark.parametrize("changes", [False, True])
def test_buffers_that_training_changes_are_said_to_be_missing_in_checkpoints(
    make_trainer: Any, write_rows: Any, tmp_path: Path, recwarn: pytest.WarningsRecorder, changes: bool
) -> None:
    module = CausalLM(deepseek(tmp_path / "model", "float32"), optimizer=lambda p: torch.optim.SGD(p, lr=0.0))
    callbacks = [ChangeBuffer()] if changes else []
    trainer = make_trainer(max_steps=2, precision="bf16-true", callbacks=callbacks)
    trainer.fit(module, TextDataModule(write_rows(count=8)))
    for name in ("one.ckpt", "two.ckpt"):
        trainer.save_checkpoint(tmp_path / name)
    said = [str(one.message) for one in recwarn if "training changes the buffers" in str(one.message)]
    assert len(said) == changes
    assert all(f"{BIAS} (1 in all), which checkpoints do not hold" in one for one in said)
