"""A run stopped at any optimizer step and resumed equals the run that was not stopped."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lit_callbacks import GracefulStop, StopRequested
from one_process import Signal
from peft import LoraConfig

from lit_ft import CausalLM, RecipeError, TextDataModule
from lit_ft.training.optimizers.schedules import CosineWithWarmup

pytestmark = pytest.mark.slow


def fit(
    make_trainer: Any,
    model_folder: str,
    data: str,
    callbacks: list[Callback],
    folder: Path,
    ckpt_path: str | None = None,
    val_fraction: float = 0.2,
) -> dict[str, torch.Tensor]:
    os.environ["PL_GLOBAL_SEED"] = "3"
    peft = LoraConfig(r=4, lora_dropout=0.2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    module = CausalLM(model_folder, peft=peft)
    module.optimizer = lambda parameters: torch.optim.AdamW(parameters, lr=1e-2)
    module.lr_scheduler = lambda optimizer: CosineWithWarmup(optimizer, warmup=0.2)
    trainer = make_trainer(
        max_epochs=3,
        accumulate_grad_batches=2,
        callbacks=[*callbacks, ModelCheckpoint(folder, save_last=True)],
        enable_checkpointing=True,
        num_sanity_val_steps=0,
    )
    rows = TextDataModule(data, micro_batch_size=2, val_fraction=val_fraction, max_length=96)
    trainer.fit(module, rows, ckpt_path=ckpt_path)
    assert trainer.current_epoch == 3
    return {name: p.detach().clone() for name, p in module.trainable_parameters().items()}


# 17 rows to train on: 9 micro-batches, 5 optimizer steps an epoch; steps 5 and 10 end one.
@pytest.mark.parametrize("val_fraction", [0.2, 0.0])
@pytest.mark.parametrize("step", [0, 2, 4, 5, 6, 9, 13])
def test_stopped_anywhere(
    make_trainer: Any, model_folder: str, write_rows: Any, tmp_path: Path, step: int, val_fraction: float
) -> None:
    data = write_rows(count=21 if val_fraction else 17)
    wanted = fit(make_trainer, model_folder, data, [], tmp_path / "whole", None, val_fraction)
    with pytest.raises(StopRequested) as stop:
        fit(
            make_trainer,
            model_folder,
            data,
            [GracefulStop(), Signal(step)],
            tmp_path / "stopped",
            None,
            val_fraction,
        )
    assert stop.value.exit_code == 130
    assert torch.load(stop.value.checkpoint, weights_only=True)["global_step"] == step + 1
    got = fit(
        make_trainer,
        model_folder,
        data,
        [GracefulStop()],
        tmp_path / "stopped",
        stop.value.checkpoint,
        val_fraction,
    )
    assert sorted(path.name for path in (tmp_path / "stopped").glob("last*")) == ["last.ckpt"]
    for name, tensor in wanted.items():
        assert torch.equal(got[name], tensor), name


def test_fewer_epochs_than_were_trained_are_refused(
    make_trainer: Any, model_folder: str, write_rows: Any, tmp_path: Path
) -> None:
    data, path = TextDataModule(write_rows(), micro_batch_size=2), tmp_path / "saved.ckpt"
    trainer = make_trainer(max_epochs=2, max_steps=-1)
    trainer.fit(CausalLM(model_folder), data)
    trainer.save_checkpoint(path)
    with pytest.raises(RecipeError, match="trainer.max_epochs=1 is less than the 2 epochs after which the checkpoint"):
        make_trainer(max_epochs=1, max_steps=-1).fit(CausalLM(model_folder), data, ckpt_path=path)


class Trained(Callback):
    """Callback that keeps the rows of each micro-batch, by epoch."""

    def __init__(self) -> None:
        self.rows: dict[int, list[str]] = {}

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        self.rows.setdefault(trainer.current_epoch, []).extend(batch.get("sample_ids", ()))


@pytest.mark.parametrize(
    "options",
    [
        {"micro_batch_size": 2},
        {"micro_batch_size": 2, "accumulate_grad_batches": 2},
        {"limit_val_batches": 0},
        {"val_check_interval": 4},
        {"val_check_interval": 1.0},
        {"val_check_interval": 0.5},
    ],
)
def test_an_epoch_that_is_over_is_not_trained_on_again(
    make_trainer: Any, model_folder: str, write_rows: Any, tmp_path: Path, options: dict[str, Any]
) -> None:
    """Whether the resumed run would validate at its last micro-batch or not."""
    path = write_rows(count=27)

    def run(size: int, ckpt_path: Path | None = None, **more: Any) -> Trained:
        data, trained = TextDataModule(path, micro_batch_size=size, val_fraction=0.2, max_length=96), Trained()
        given = {"val_check_interval": 0.5, "enable_checkpointing": True, **more}
        trainer = make_trainer(callbacks=[trained, ModelCheckpoint(tmp_path, save_last=True)], **given)
        trainer.fit(CausalLM(model_folder, peft=LoraConfig(r=2)), data, ckpt_path=ckpt_path)
        assert trainer.current_epoch == given["max_epochs"]
        return trained

    (first,) = run(4, max_epochs=1).rows.values()  # 22 rows in 6 micro-batches, validated after 3 and 6
    more = {name: value for name, value in options.items() if name != "micro_batch_size"}
    found = run(options.get("micro_batch_size", 4), tmp_path / "last.ckpt", max_epochs=2, **more).rows
    assert found.keys() == {1}
    assert sorted(found[1]) == sorted(first)
    assert found[1] != first
