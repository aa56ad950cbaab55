"""Checkpoints of modules of one's own under sharded strategies: what is saved, and that it is found again."""

import resource
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lit_callbacks.distributed.gather import full_weights
from peft import LoraConfig
from ranks import on_ranks
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils.data import DataLoader

from lit_ft import CausalLM, RecipeError, TextDataModule
from lit_ft.checkpointing.storage.sharded import save_sharded
from lit_ft.strategies import DeepSpeedStrategy, FSDPStrategy

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("saved states")]

GROUPS = {"b before a": [["b", "a"]], "alike": [["a"], ["b"]], "b alone, before a": [["b"], ["a"]]}


class OwnModule(LightningModule):
    """Two layers whose weights an optimizer takes in an order of its own."""

    def __init__(self, groups: list[list[str]]) -> None:
        super().__init__()
        self.a, self.b, self.groups = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), groups
        self.resumed: dict[str, float] = {}

    def forward(self, batch: Tensor) -> Tensor:
        output: Tensor = self.b(self.a(batch))
        return output

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self(batch).pow(2).mean()
        return loss

    def configure_optimizers(self) -> AdamW:
        return AdamW([{"params": [self.get_parameter(f"{name}.weight") for name in own]} for own in self.groups])

    def on_train_start(self) -> None:
        self.resumed = self.moments()

    def moments(self) -> dict[str, float]:
        """Sums of AdamW's first moment of each weight, by its name."""
        states: Any = self.trainer.optimizers[0].state
        return {n: states[p]["exp_avg"].full_tensor().sum().item() for n, p in self.named_parameters() if p in states}


def _trainer(strategy: Any, steps: int, devices: int = 1) -> Trainer:
    silent = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, max_steps=steps, enable_checkpointing=False, **silent
    )


def _save_and_resume(
    folder: Path, groups: list[list[str]], in_shares: bool
) -> tuple[dict[str, float], dict[str, float]]:
    """AdamW's moments when a checkpoint is saved, and when a run resumes from it."""
    torch.manual_seed(1)
    data = DataLoader(torch.randn(8, 2, 4), batch_size=None)  # type: ignore[arg-type]  # a tensor is a dataset
    found: list[Any] = []
    for steps, ckpt in ((2, None), (3, str(folder / "saved.ckpt"))):
        module, trainer = OwnModule(groups), _trainer(FSDPStrategy(save_distributed_checkpoint=in_shares), steps)
        trainer.fit(module, data, ckpt_path=ckpt)
        trainer.save_checkpoint(folder / "saved.ckpt")
        found.append(module.moments() if ckpt is None else module.resumed)
    return found[0], found[1]


@pytest.mark.parametrize("in_shares", [False, True], ids=["file", "folder"])
@pytest.mark.parametrize("name", GROUPS)
def test_the_state_of_an_optimizer_is_that_of_its_own_weights(tmp_path: Path, name: str, in_shares: bool) -> None:
    """It was sorted into the module's order, and loaded without regard to names."""
    ((saved, resumed),) = on_ranks(1, _save_and_resume, tmp_path, GROUPS[name], in_shares, timeout=60)
    assert resumed == saved
    assert saved.keys() == {"a.weight", "b.weight"}


class WithMeans(OwnModule):
    """Means of what it reads in buffers, and a layer that does not train."""

    def __init__(self) -> None:
        super().__init__([["a"]])
        self.means = nn.BatchNorm1d(4, affine=False)
        self.b.requires_grad_(False)
        self.before: dict[str, Tensor] = {}

    def forward(self, batch: Tensor) -> Tensor:
        return super().forward(self.means(batch))

    def on_train_start(self) -> None:
        self.before = {name: tensor.clone() for name, tensor in full_weights(self).items()}


def _stage(number: int) -> DeepSpeedStrategy:
    return DeepSpeedStrategy(config={"zero_optimization": {"stage": number, "stage3_param_persistence_threshold": 0}})


SAVED_BY: dict[str, Any] = {
    "fsdp, file": partial(FSDPStrategy, save_distributed_checkpoint=False),
    "fsdp, folder": partial(FSDPStrategy, save_distributed_checkpoint=True),
    "zero2": partial(_stage, 2),
    "zero3": partial(_stage, 3),
}


def _weights_saved_and_resumed(path: Path, saved_by: str, resumed_by: str) -> list[dict[str, list[float]]]:
    """All that a module has, when a checkpoint is saved and when a run resumes from it."""
    data = DataLoader(torch.randn(8, 2, 4) + 3, batch_size=None)  # type: ignore[arg-type]  # a tensor is a dataset
    module, trainer = WithMeans(), _trainer(SAVED_BY[saved_by](), 2)
    trainer.fit(module, data)
    trainer.save_checkpoint(path)
    saved = full_weights(module)
    module = WithMeans()
    _trainer(SAVED_BY[resumed_by](), 3).fit(module, data, ckpt_path=path)
    return [{name: tensor.tolist() for name, tensor in of.items()} for of in (saved, module.before)]


@pytest.mark.parametrize("saved_by", SAVED_BY)
@pytest.mark.parametrize("resumed_by", ["fsdp, file", "zero2", "zero3"])
def test_a_module_of_ones_own_is_saved_with_its_buffers_and_frozen_weights(
    tmp_path: Path, saved_by: str, resumed_by: str
) -> None:
    """A recipe's model has them in its folder; those of another module were lost."""
    arguments = tmp_path / "saved.ckpt", saved_by, resumed_by
    ((saved, resumed),) = on_ranks(1, _weights_saved_and_resumed, *arguments, timeout=60)
    assert saved.keys() == {f"means.{n}" for n in ("running_mean", "running_var", "num_batches_tracked")} | {
        "a.weight",
        "b.weight",
    }
    assert resumed == saved


def _save_on_a_full_disk(path: Path, saved_by: str) -> str:
    """What a rank says of a checkpoint that rank 0 alone cannot write."""
    trainer = _trainer(SAVED_BY[saved_by](), 1, devices=2)
    data = DataLoader(torch.randn(8, 2, 4), batch_size=None)  # type: ignore[arg-type]  # a tensor is a dataset
    trainer.fit(WithMeans(), data)

    def full(*_: Any, **__: Any) -> None:
        raise RecipeError("the disk is full")

    trainer.strategy.checkpoint_io.save_checkpoint = full  # type: ignore[method-assign]
    with pytest.raises(RecipeError) as caught:
        trainer.save_checkpoint(path)
    return str(caught.value)


@pytest.mark.parametrize("saved_by", ["fsdp, file", "zero2"])
def test_a_file_that_rank_0_cannot_write_fails_on_all_ranks(tmp_path: Path, saved_by: str) -> None:
    """The others waited for it until the time limit of their process group."""
    assert on_ranks(2, _save_on_a_full_disk, tmp_path / "saved.ckpt", saved_by, timeout=60) == ["the disk is full"] * 2


def test_a_folder_whose_rest_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))  # what the kernel does at a quota
    try:
        with pytest.raises(RecipeError, match=r"checkpoint '.*last.ckpt' could not be written: File too large; make"):
            save_sharded({"state_dict": {"w": torch.zeros(4)}, "own": "x" * 100_000}, tmp_path / "last.ckpt", [])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.iterdir())


ASYNC = {
    "file": ({"save_distributed_checkpoint": False}, OwnModule, "save_distributed_checkpoint=False"),
    "adapter": ({}, partial(CausalLM, peft=LoraConfig(r=2, target_modules="all-linear")), "as an adapter's are"),
    "folder": ({}, OwnModule, None),
    "adapter's folder": (
        {"save_distributed_checkpoint": True},
        partial(CausalLM, peft=LoraConfig(r=2, target_modules="all-linear")),
        None,
    ),
}


def _said_of_async_save(folder: str, rows: str, name: str) -> list[str]:
    options, make, _ = ASYNC[name]
    trainer = _trainer(FSDPStrategy(async_save=True, **options), 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if make is OwnModule:
            data = DataLoader(torch.randn(8, 2, 4), batch_size=None)  # type: ignore[arg-type]  # a tensor is a dataset
            trainer.fit(OwnModule([["a", "b"]]), data)
        else:
            trainer.fit(make(folder), TextDataModule(rows, max_length=96))
    return [said for warning in caught if "async_save" in (said := str(warning.message))]


@pytest.mark.parametrize("name", ASYNC)
def test_async_save_of_single_files_is_told_to_have_no_effect(model_folder: str, write_rows: Any, name: str) -> None:
    (said,) = on_ranks(1, _said_of_async_save, model_folder, write_rows(count=8), name, timeout=60)
    why = ASYNC[name][2]
    assert said == [
        f"trainer.strategy async_save=True has no effect on checkpoints that are one file ({why}); leave it out, or "
        "set save_distributed_checkpoint to true"
    ] * (why is not None)
