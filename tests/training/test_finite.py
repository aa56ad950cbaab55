"""NaN and infinite numbers end a run with the reason, and are never saved."""

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lit_callbacks import AdapterMerger, SpikeGuard
from peft import LoraConfig
from ranks import on_ranks
from shared_fixtures import make_tokenizer
from transformers import AutoModelForCausalLM

from lit_ft import CausalLM, RecipeError, TextDataModule
from lit_ft.cli import main
from lit_ft.errors import NotFinite
from lit_ft.model.files.finite_weights import not_finite
from lit_ft.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy

LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


class Poison(Callback):
    """Makes a weight or a gradient NaN in the third optimizer step."""

    def __init__(self, what: str, rank: int = 0) -> None:
        self.what, self.rank = what, rank

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if self.what == "weight" and trainer.global_step == 2:
            next(iter(pl_module.trainable_parameters().values())).data.fill_(float("nan"))

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if self.what == "gradient" and trainer.global_step == 2:
            next(p.grad for p in pl_module.parameters() if p.grad is not None).fill_(float("inf"))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if self.what == "update" and trainer.global_step == 3:
            next(iter(pl_module.trainable_parameters().values())).data.view(-1)[0] = float("inf")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "message"),
    [
        (
            "weight",
            "step 3: train/loss is nan; .*last.ckpt is from before it: go on from there, with a lower l",
        ),
        ("gradient", "step 3: train/grad_norm is inf; .*last.ckpt is from before it"),
        ("update", "after step 3 model.*lora_A.* is not finite: nothing is saved; .*last.ckpt is from before it"),
    ],
)
def test_a_run_ends_at_the_first_step_that_is_not_finite(
    make_trainer: Any, model_folder: str, write_rows: Any, tmp_path: Path, what: str, message: str
) -> None:
    checkpoint = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1, save_last=True)
    merger = AdapterMerger(tmp_path / "adapter")
    trainer = make_trainer(max_steps=6, callbacks=[Poison(what), merger, checkpoint], enable_checkpointing=True)
    with pytest.raises(NotFinite, match=message):
        trainer.fit(CausalLM(model_folder, peft=LORA), TextDataModule(write_rows()))
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == ["last.ckpt", "step=1.ckpt", "step=2.ckpt"]
    assert not (tmp_path / "adapter").exists()
    for path in tmp_path.glob("*.ckpt"):
        assert not list(not_finite(torch.load(path, weights_only=True)["state_dict"]))


def test_spike_guard_takes_its_place(make_trainer: Any, model_folder: str, write_rows: Any, tmp_path: Path) -> None:
    guard = SpikeGuard(folder=tmp_path)
    trainer = make_trainer(max_steps=4, callbacks=[Poison("gradient"), guard])
    trainer.fit(CausalLM(model_folder, peft=LORA), TextDataModule(write_rows()))
    assert (trainer.global_step, guard.skipped_steps) == (4, 1)


def test_a_window_without_supervised_tokens_is_no_failure(make_trainer: Any, model_folder: str) -> None:
    ids = torch.arange(1, 9)[None]
    batches = [{"input_ids": ids, "labels": torch.full_like(ids, -100)}, {"input_ids": ids, "labels": ids}]
    trainer = make_trainer(max_epochs=1)
    trainer.fit(CausalLM(model_folder, peft=LORA), torch.utils.data.DataLoader(batches, batch_size=None))
    assert trainer.global_step == 2
    assert math.isfinite(trainer.callback_metrics["train/loss"])


def test_an_adapter_that_is_not_finite_is_not_written(model_folder: str, tmp_path: Path) -> None:
    module = CausalLM(model_folder, peft=LORA)
    module.configure_model()
    next(iter(module.trainable_parameters().values())).data[0] = float("nan")
    with pytest.raises(NotFinite, match="lora_A.* is not finite: the adapter is not written"):
        module.save_adapter(tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()


def test_the_command_ends_with_1(
    model_folder: str, write_rows: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    arguments = ["fit", "--model.pretrained", model_folder, "--data.path", write_rows(), "--run_dir", str(run)]
    arguments += ["--optimizer", "torch.optim.SGD", "--optimizer.lr", "1e30", "--trainer.accelerator", "cpu"]
    with pytest.raises(SystemExit) as stopped:
        main([*arguments, "--trainer.max_steps", "9"])
    assert stopped.value.code == 1
    said = capsys.readouterr().err
    assert "failed: NotFinite: step 2: train/" in said
    assert "no checkpoint is from before it: start again, with a lower learning rate" in said
    assert not (run / "merged").exists()
    assert not list(run.rglob("*.ckpt"))


# --- the base ------------------------------------------------------------------------------------------


@pytest.fixture
def bad_base(model_folder: str, tmp_path: Path) -> str:
    """A base whose last layer has a NaN, in files of bf16."""
    folder = tmp_path / "bad"
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.bfloat16)
    model.model.layers[1].mlp.up_proj.weight.data[-1, -1] = float("nan")
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(folder)


def test_a_base_that_is_not_finite_is_refused(bad_base: str) -> None:
    with pytest.raises(RecipeError, match=r"the weight model\.layers\.1\.mlp\.up_proj\.weight has values that are NaN"):
        CausalLM(bad_base, peft=LORA).configure_model()


SPLIT: dict[str, Any] = {
    "fsdp": FSDPStrategy,
    "pp2": lambda: ModelParallelStrategy(pipeline_parallel_size=2),
    "zero3": lambda: DeepSpeedStrategy(stage=3),
}


def refusal(make_trainer: Any, folder: str, data: str, strategy: str) -> str:
    os.environ |= {"PL_GLOBAL_SEED": "3", "DS_ACCELERATOR": "cpu"}
    trainer = make_trainer(max_steps=1, devices=2, strategy=SPLIT[strategy](), use_distributed_sampler=False)
    try:
        trainer.fit(CausalLM(folder, peft=LORA, dtype="float32"), TextDataModule(data, micro_batch_size=2))
    except RecipeError as error:
        return str(error)
    return "trained"


@pytest.mark.processes
@pytest.mark.parametrize("strategy", SPLIT)
def test_ranks_that_read_a_part_refuse_it_together(
    make_trainer: Any, bad_base: str, write_rows: Any, strategy: str
) -> None:
    said = on_ranks(2, refusal, make_trainer, bad_base, write_rows(), strategy, timeout=100)
    assert all("values that are NaN or infinite" in line for line in said)
    assert any("layers.1.mlp.up_proj.weight has" in line for line in said)


def poisoned_run(make_trainer: Any, folder: str, data: str, out: str, strategy: str) -> str:
    os.environ |= {"PL_GLOBAL_SEED": "3", "DS_ACCELERATOR": "cpu"}
    how = "ddp" if strategy == "ddp" else SPLIT[strategy]()
    checkpoint = ModelCheckpoint(out, "{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = make_trainer(
        max_steps=6,
        devices=2,
        strategy=how,
        use_distributed_sampler=False,
        callbacks=[Poison("weight"), checkpoint],
        enable_checkpointing=True,
    )
    try:
        trainer.fit(CausalLM(folder, peft=LORA, optimizer=sgd), TextDataModule(data, micro_batch_size=2))
    except NotFinite as error:
        return str(error)
    return "trained"


@pytest.mark.processes
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "pp2"])
def test_ranks_end_together(
    make_trainer: Any, model_folder: str, write_rows: Any, tmp_path: Path, strategy: str
) -> None:
    arguments = make_trainer, model_folder, write_rows(), str(tmp_path / "out"), strategy
    said = on_ranks(2, poisoned_run, *arguments, timeout=100)
    assert all(line.startswith("step 3: train/loss is nan; ") for line in said)
    assert sorted(path.name for path in (tmp_path / "out").glob("*.ckpt")) == ["step=1.ckpt", "step=2.ckpt"]


def test_parts_that_are_looked_at() -> None:
    tensors: dict[str, torch.Tensor] = {
        name: torch.ones(5, dtype=dtype) for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16))
    }
    tensors["fp8"], tensors["packed"] = torch.ones(4).to(torch.float8_e4m3fn), torch.ones(3, dtype=torch.uint8)
    tensors["huge"] = torch.full((9,), 3e38)
    assert list(not_finite(tensors)) == []
    tensors["bf16"][2], tensors["fp16"][4] = float("nan"), float("-inf")
    tensors["fp8"] = torch.tensor([1.0, float("nan")]).to(torch.float8_e4m3fn)
    tensors["packed"].SCB = torch.tensor([1.0, float("inf")])  # type: ignore[attr-defined]
    assert list(not_finite(tensors)) == ["bf16", "fp16", "fp8", "packed"]


@pytest.mark.parametrize(
    ("rank", "part", "bad"), [(0, [1.0, math.nan], 0), (1, [math.nan] * 2, 0), (0, [math.nan, 1.0], 1)]
)
def test_what_zero_3_appends_to_a_part_is_no_value(rank: int, part: list[float], bad: int) -> None:
    """Of 1 element on two ranks: memory that nothing was written to."""
    parameter: Any = torch.nn.Parameter(torch.empty(0))
    parameter.ds_id, parameter.ds_numel, parameter.ds_tensor = 0, 1, torch.tensor(part)
    parameter.ds_zero_partition_rank = rank
    assert len(list(not_finite({"alpha": parameter}))) == bad
