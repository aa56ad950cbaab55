"""Lightning's callbacks that change what is trained: averages of weights, and those that are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import clean_environment, here, recipe  # noqa: F401 (a fixture)
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BatchSizeFinder,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from peft import LoraConfig
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

from lit_ft import CausalLM, RecipeError, TextDataModule
from lit_ft.strategies import DeepSpeedStrategy, FSDPStrategy
from lit_ft.training.steps.lightning_callbacks import (
    average_what_differs,
    check_accumulation,
    check_lightning_callbacks,
)

ONE_DEVICE = SingleDeviceStrategy("cpu")


@pytest.mark.parametrize(
    "callback",
    [BackboneFinetuning(), BatchSizeFinder(), ModelPruning("l1_unstructured"), StochasticWeightAveraging(swa_lrs=0.1)],
    ids=lambda callback: type(callback).__name__,
)
def test_what_would_do_nothing_or_another_thing_is_refused(callback: Callback) -> None:
    with pytest.raises(RecipeError, match=rf"trainer.callbacks: {type(callback).__name__} \w+"):
        check_lightning_callbacks([callback], ONE_DEVICE)


def test_a_callback_is_refused_before_it_fails_by_itself(make_trainer: Any, model_folder: str, write_rows: Any) -> None:
    with pytest.raises(RecipeError, match="BackboneFinetuning freezes parts of a model that is not there yet"):
        make_trainer(max_steps=1, callbacks=[BackboneFinetuning()]).fit(
            CausalLM(model_folder), TextDataModule(write_rows())
        )


def test_averages_are_refused_where_no_rank_has_all_weights() -> None:
    for strategy in (ONE_DEVICE, DDPStrategy()):
        check_lightning_callbacks([WeightAveraging(), EMAWeightAveraging()], strategy)
    for strategy in (FSDPStrategy(), DeepSpeedStrategy(stage=2)):
        with pytest.raises(RecipeError, match=f"not under {type(strategy).__name__}; remove it, or set"):
            check_lightning_callbacks([EMAWeightAveraging()], strategy)


@pytest.mark.parametrize(
    ("count", "accumulate", "strategy", "message"),
    [
        (1, 4, ONE_DEVICE, "and so does trainer.accumulate_grad_batches=4; leave one of them out"),
        (2, 1, ONE_DEVICE, "and there are 2 of them"),
        (1, 1, DeepSpeedStrategy(stage=2), "which DeepSpeed takes once for the run"),
    ],
)
def test_micro_batches_of_a_step_are_said_once(count: int, accumulate: int, strategy: Any, message: str) -> None:
    schedulers = [GradientAccumulationScheduler({0: 2})] * count
    with pytest.raises(RecipeError, match=message):
        check_accumulation(schedulers, accumulate, strategy)
    check_accumulation(schedulers[:1], 1, ONE_DEVICE)
    check_accumulation([], accumulate, strategy)


@pytest.mark.parametrize("of", [{"avg_fn": get_ema_avg_fn(0.9)}, {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}, {}])
def test_an_average_of_equal_weights_is_bit_identical(of: dict[str, Any]) -> None:
    model = nn.ParameterDict({name: nn.Parameter(torch.randn(10_000).bfloat16()) for name in ("frozen", "trained")})
    model.codes = nn.Buffer(torch.arange(256, dtype=torch.uint8))
    average = AveragedModel(model, use_buffers="multi_avg_fn" not in of, **of)
    average_what_differs(average)
    start = model.trained.detach().clone()
    for step in range(4):
        with torch.no_grad():
            model.trained.copy_(start + step)
        average.update_parameters(model)
    assert torch.equal(average.module.frozen, model.frozen)
    assert torch.equal(average.module.codes, model.codes)
    expected = start + (1.5 if not of else 0.9**2 * 0.1 + 0.9 * 0.2 + 0.3)  # the mean of 0 to 3, or EMA's
    torch.testing.assert_close(average.module.trained, nn.Parameter(expected), rtol=0.02, atol=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stop", "code"),
    [
        (["--trainer.max_steps", "7"], 0),
        (["--allow_code", "one_process", "--trainer.callbacks+=one_process.Signal", "--trainer.callbacks.step=6"], 130),
    ],
    ids=["length", "signal"],
)
def test_the_average_is_saved_and_exported_without_the_base_and_a_resumed_run_goes_on_with_it(
    tmp_path: Path, model_folder: str, write_rows: Any, monkeypatch: pytest.MonkeyPatch, stop: list[str], code: int
) -> None:
    average = {"class_path": "EMAWeightAveraging", "init_args": {"decay": 0.5}}
    # Without a schedule, which would end with the run that stops.
    fit = [*recipe(tmp_path, model_folder, write_rows(), max_epochs=3, callbacks=[average]), "--lr_scheduler", "null"]
    full, stopped = tmp_path / "full", tmp_path / "stopped"
    here(monkeypatch, *fit, "--run_dir", str(full))
    here(monkeypatch, *fit, "--run_dir", str(stopped), *stop, code=code)
    here(monkeypatch, *fit, "--run_dir", str(stopped), "--resume", "auto")
    wanted, got = (torch.load(one / "checkpoints" / "last.ckpt", weights_only=True) for one in (full, stopped))
    trained, averaged = wanted["current_model_state"], wanted["state_dict"]
    assert trained.keys() == averaged.keys()
    assert all("lora" in name for name in trained)
    assert not any(torch.equal(trained[name], averaged[name]) for name in trained)
    assert all(torch.equal(got["current_model_state"][name], tensor) for name, tensor in trained.items())
    assert all(torch.equal(got["state_dict"][name], tensor) for name, tensor in averaged.items())
    assert got["averaging_state"]["n_averaged"] == wanted["global_step"] > 7
    adapter = load_file(full / "adapter" / "adapter_model.safetensors")
    assert {f"model.{name}" for name in adapter} == {name.replace("default.", "") for name in averaged}
    assert all(torch.equal(adapter[n.replace("default.", "").removeprefix("model.")], t) for n, t in averaged.items())


class SaveInValidation(Callback):
    """Callback that saves within the first validation, and right after it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_validation_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer.save_checkpoint(self.folder / "within.ckpt")

    def on_validation_end(self, trainer: Any, *_: Any) -> None:
        trainer.save_checkpoint(self.folder / "after.ckpt")


def test_what_an_exception_within_a_validation_saves_is_not_the_average_in_place_of_the_weights(
    make_trainer: Any, model_folder: str, write_rows: Any, tmp_path: Path
) -> None:
    """A validation computes with the average, and Lightning exchanges the two for it."""
    module = CausalLM(model_folder, peft=LoraConfig(r=4, target_modules="all-linear"))
    callbacks = [EMAWeightAveraging(decay=0.5), SaveInValidation(tmp_path)]
    data = TextDataModule(write_rows(), val_path=write_rows(name="val.json", count=2))
    make_trainer(max_steps=2, val_check_interval=2, callbacks=callbacks).fit(module, data)
    within, after = (torch.load(tmp_path / f"{name}.ckpt", weights_only=True) for name in ("within", "after"))
    for key in ("state_dict", "current_model_state"):
        assert all(torch.equal(within[key][name], tensor) for name, tensor in after[key].items())
    assert not all(torch.equal(after["state_dict"][name], t) for name, t in after["current_model_state"].items())
