"""Every fragment of recipes/optimizers: the library's own steps, groups, schedules, clipping, and exact resumption."""

import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.optim import AdamW8bit, Lion, PagedAdamW8bit
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins import MixedPrecision
from lit_callbacks import AdapterMerger, GracefulStop, StopRequested
from one_process import Signal
from peft import LoraConfig, PromptTuningConfig
from pytorch_optimizer import GaLore
from ranks import on_ranks
from safetensors.torch import load_file
from schedulefree import AdamWScheduleFree
from torch import Tensor
from torch.optim import SGD, Adafactor, AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import StepLR

from benchmarks.memory.optimizer_state import FRAGMENTS, bytes_per_weight, read_optimizer, state_bytes
from lit_ft import CausalLM, RecipeError, TextDataModule
from lit_ft.cli import main
from lit_ft.strategies import FSDPStrategy
from lit_ft.training.optimizers.configure import MATRICES, SplitOptimizer, configure_optimizers, hidden_matrices
from lit_ft.training.optimizers.schedules import ConstantWithWarmup, LinearWithWarmup

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[2]
NAMES = sorted(path.stem for path in FRAGMENTS.glob("*.yaml"))
Weights = dict[str, Tensor]

BY_HAND: dict[str, Callable[[list[Tensor], list[Tensor]], list[Optimizer]]] = {
    "adafactor": lambda m, o: [Adafactor([*m, *o], lr=5e-2, weight_decay=0.0)],
    "adamw_8bit": lambda m, o: [AdamW8bit([*m, *o], lr=1e-3)],
    "adamw_fused": lambda m, o: [AdamW([*m, *o], lr=1e-3, fused=True)],
    "galore": lambda m, o: [
        GaLore(
            [{"params": m, "rank": 32, "update_proj_gap": 2, "scale": 0.25, "projection_type": "std"}, {"params": o}],
            lr=1e-3,
        )
    ],
    "lion": lambda m, o: [Lion([*m, *o], lr=1e-3)],
    "muon": lambda m, o: [
        Muon(m, lr=3e-3, adjust_lr_fn="match_rms_adamw", weight_decay=0.0),
        AdamW(o, lr=3e-3, weight_decay=0.0),
    ],
    "paged_adamw_8bit": lambda m, o: [PagedAdamW8bit([*m, *o], lr=1e-3)],
    "schedule_free": lambda m, o: [AdamWScheduleFree([*m, *o], lr=3e-3)],
}
"""The optimizers as their libraries' users make them, from the matrices of hidden layers and the other weights."""


def optimizer_of(name: str) -> Any:
    """A fragment's optimizer; GaLore projects anew every two steps, so that short tests see it."""
    return read_optimizer(FRAGMENTS / f"{name}.yaml", **({"update_proj_gap": 2} if name == "galore" else {}))


class Recorder(Callback):
    """Keeps the gradients, learning rates and weights of each optimizer step."""

    def __init__(self) -> None:
        self.start: Weights = {}
        self.gradients: list[Weights] = []
        self.gradients_at: list[Weights] = []
        self.rates: list[list[float]] = []
        self.validated: list[tuple[float, Weights]] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.start = weights_of(pl_module)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Optimizer) -> None:
        self.gradients.append({n: p.grad.clone() for n, p in pl_module.trainable_parameters().items()})
        self.gradients_at.append(weights_of(pl_module))
        self.rates.append([group["lr"] for group in optimizer.param_groups])

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.validated.append((float(trainer.callback_metrics["val/loss"]), weights_of(pl_module)))


def weights_of(module: CausalLM) -> Weights:
    return {n: p.detach().clone() for n, p in module.trainable_parameters().items()}


def make_module(folder: str, name: str, **options: Any) -> CausalLM:
    module = CausalLM(folder, **options)
    module.optimizer = optimizer_of(name)
    return module


def assert_same(got: Weights, wanted: Weights) -> None:
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(got[name], tensor), name


def replay(recorder: Recorder, name: str, matrices: set[str]) -> tuple[Weights, list[Optimizer]]:
    """The recorded gradients through the library's own optimizers."""
    weights = {n: torch.nn.Parameter(p.clone()) for n, p in recorder.start.items()}
    of_matrices, others = ([p for n, p in weights.items() if (n in matrices) is kind] for kind in (True, False))
    optimizers: list[Any] = BY_HAND[name](of_matrices, others)
    for gradients in recorder.gradients:
        for optimizer in optimizers:
            if hasattr(optimizer, "train"):
                optimizer.train()
        for n, parameter in weights.items():
            parameter.grad = gradients[n].clone()
        for optimizer in optimizers:
            optimizer.step()
    for optimizer in optimizers:
        if hasattr(optimizer, "eval"):
            optimizer.eval()
    return {n: p.detach() for n, p in weights.items()}, optimizers


def test_each_fragment_is_tested() -> None:
    assert sorted(BY_HAND) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_steps_are_those_of_the_library(make_trainer: Any, model_folder: str, write_rows: Any, name: str) -> None:
    recorder = Recorder()
    module = make_module(model_folder, name)
    make_trainer(max_steps=5, callbacks=[recorder]).fit(module, TextDataModule(write_rows(), micro_batch_size=4))
    matrices = {n for n, p in module.trainable_parameters().items() if p in hidden_matrices(module)}
    wanted, optimizers = replay(recorder, name, matrices)
    assert_same(weights_of(module), wanted)
    if "8bit" in name:
        assert {t.dtype for o in optimizers for s in o.state.values() for t in s.values() if torch.is_tensor(t)} >= {
            torch.uint8
        }


@pytest.mark.parametrize("name", NAMES)
def test_groups_and_schedules(make_trainer: Any, model_folder: str, write_rows: Any, name: str) -> None:
    recorder = Recorder()
    module = make_module(model_folder, name, lr_factors={"norm|q_proj.bias": 0.0, "up_proj": 0.0, "v_proj": 0.5})
    module.lr_scheduler = lambda optimizer: LinearWithWarmup(optimizer, warmup=2)
    make_trainer(max_steps=6, callbacks=[recorder]).fit(module, TextDataModule(write_rows(), micro_batch_size=4))
    lr = {"adafactor": 5e-2, "muon": 3e-3, "schedule_free": 3e-3}.get(name, 1e-3)
    # Matrices: the rest, up_proj, v_proj; others: embeddings and biases, norms, the bias of v_proj.
    factors = [1.0, 0.0, 0.5, 1.0, 0.0, 0.5]
    for step, share in enumerate([0.0, 0.5, 1.0, 0.75, 0.5, 0.25]):
        assert recorder.rates[step] == pytest.approx([lr * factor * share for factor in factors])
    for weight, tensor in weights_of(module).items():
        frozen = re.search("norm|q_proj.bias|up_proj", weight) is not None
        assert torch.equal(tensor, recorder.start[weight]) is frozen, weight


def fit_and_stop(
    make_trainer: Any, module: CausalLM, data: str, folder: Path, stop: int | None = None, resume: str | None = None
) -> tuple[Weights, list[float]]:
    torch.manual_seed(3)
    recorder = Recorder()
    trainer = make_trainer(
        max_epochs=2,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        callbacks=[
            GracefulStop(),
            recorder,
            ModelCheckpoint(folder, save_last=True),
            *([] if stop is None else [Signal(stop)]),
        ],
        enable_checkpointing=True,
        num_sanity_val_steps=0,
    )
    trainer.fit(module, TextDataModule(data, micro_batch_size=2, val_fraction=0.2, max_length=96), ckpt_path=resume)
    return weights_of(module), [loss for loss, _ in recorder.validated]


# 17 rows to train on: 9 micro-batches, 5 optimizer steps an epoch.
@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_is_the_whole_run(
    make_trainer: Any, model_folder: str, write_rows: Any, tmp_path: Path, name: str
) -> None:
    data = write_rows(count=21)

    def module() -> CausalLM:
        built = make_module(model_folder, name)
        built.lr_scheduler = lambda optimizer: LinearWithWarmup(optimizer, warmup=1)
        return built

    wanted, losses = fit_and_stop(make_trainer, module(), data, tmp_path / "whole")
    for step in (2, 6):
        folder = tmp_path / f"stopped-{step}"
        with pytest.raises(StopRequested) as stop:
            fit_and_stop(make_trainer, module(), data, folder, step)
        # Plain tensors and numbers: nothing in it has to be trusted.
        torch.load(stop.value.checkpoint, weights_only=True)
        got, resumed_losses = fit_and_stop(make_trainer, module(), data, folder, resume=stop.value.checkpoint)
        assert_same(got, wanted)
        assert resumed_losses == losses[-len(resumed_losses) :]


# --- one optimizer made of two -------------------------------------------------------------------


def test_hidden_matrices_are_no_embeddings_and_no_head(model_folder: str) -> None:
    module = CausalLM(model_folder)
    module.configure_model()
    names = {n.split(".")[-2] for n, p in module.named_parameters() if p in hidden_matrices(module)}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    untied = torch.nn.Linear(48, 384, bias=False)
    module.base_model.set_output_embeddings(untied)
    assert untied.weight not in hidden_matrices(module)


def test_lora_is_matrices_only(model_folder: str) -> None:
    module = CausalLM(model_folder, peft=LoraConfig(target_modules="all-linear"))
    module.configure_model()
    assert set(module.trainable_parameters().values()) <= hidden_matrices(module)


def groups_of(*kinds: bool) -> list[dict[str, Any]]:
    return [{"params": [torch.nn.Parameter(torch.ones(2, 2))], MATRICES: kind} for kind in kinds]


def test_a_split_optimizer_steps_both_after_the_closure() -> None:
    groups = groups_of(True, False)
    of_matrices, other = (group["params"][0] for group in groups)
    optimizer = SplitOptimizer(groups, matrices=lambda p: SGD(p, lr=1.0), others=lambda p: SGD(p, lr=0.5))

    def closure() -> float:
        optimizer.zero_grad()
        loss = (of_matrices + other).sum()
        loss.backward()
        return float(loss)

    assert optimizer.step(closure) == 8.0
    assert of_matrices.tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert other.tolist() == [[0.5, 0.5], [0.5, 0.5]]


def test_a_split_optimizer_has_the_state_of_both() -> None:
    """Those who measure it, or move it to another device, find it all, also after it was loaded."""
    build = lambda: SplitOptimizer(groups_of(True, False), matrices=partial(SGD, lr=1.0, momentum=0.9), others=AdamW)  # noqa: E731
    first, then = build(), build()
    for group in first.param_groups:
        group["params"][0].grad = torch.ones(2, 2)
    first.step()
    then.load_state_dict(first.state_dict())
    assert len(first.state) == len(then.state) == 2
    for parameter, state in list(then.state.items()):
        then.state[parameter] = {name: 2 * value for name, value in state.items()}
    of_matrices, others = then.parts
    assert next(iter(of_matrices.state.values()))["momentum_buffer"].unique().tolist() == [2.0]
    assert next(iter(others.state.values()))["step"] == 2


@pytest.mark.parametrize("name", ["muon", "galore"])
def test_without_matrices(make_trainer: Any, model_folder: str, write_rows: Any, name: str) -> None:
    peft = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    module = make_module(model_folder, name, peft=peft)
    with pytest.raises(RecipeError, match="no weight matrix of a hidden layer is trained"):
        make_trainer(max_steps=1).fit(module, TextDataModule(write_rows(), micro_batch_size=4))


# --- schedule-free -------------------------------------------------------------------------------


def schedule_free_run(
    make_trainer: Any, folder: str, data: str, *callbacks: Callback, val_fraction: float = 0.2, **options: Any
) -> tuple[CausalLM, Recorder]:
    recorder = Recorder()
    peft = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    module = make_module(folder, "schedule_free", peft=peft)
    module.lr_scheduler = lambda optimizer: ConstantWithWarmup(optimizer, warmup=2)
    saves = bool(callbacks)
    options = {"max_epochs": 2, "num_sanity_val_steps": 2, "enable_checkpointing": saves, **options}
    trainer = make_trainer(callbacks=[recorder, *callbacks], **options)
    rows = TextDataModule(data, micro_batch_size=4, val_fraction=val_fraction, max_length=96)
    trainer.fit(module, rows)
    return module, recorder


class SaveAt(Callback):
    """Saves within an epoch, between validations."""

    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path
        self.training: Weights = {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            self.training = weights_of(pl_module)
            trainer.save_checkpoint(self.path)
            assert_same(weights_of(pl_module), self.training)


def averages_by_hand(recorder: Recorder, warmup: int) -> tuple[list[Weights], list[Weights]]:
    """Training weights y and averages x after each step, by the formulas of the paper (arXiv:2405.15682, section 2)."""
    beta1, beta2, lr, eps = 0.9, 0.999, 3e-3, 1e-8
    x = {n: p.double() for n, p in recorder.start.items()}
    z, v = {n: p.clone() for n, p in x.items()}, {n: torch.zeros_like(p) for n, p in x.items()}
    ys, xs, total, largest = [], [], 0.0, 0.0
    for k, gradients in enumerate(recorder.gradients):
        rate = lr * min(1.0, k / warmup)
        largest = max(largest, rate)
        total += largest**2
        share = largest**2 / total if total else 0.0
        for n, gradient in gradients.items():
            g = gradient.double()
            v[n] = beta2 * v[n] + (1 - beta2) * g**2
            z[n] = z[n] - rate * g / ((v[n] / (1 - beta2 ** (k + 1))).sqrt() + eps)
            x[n] = (1 - share) * x[n] + share * z[n]
        xs.append(dict(x))
        ys.append({n: (1 - beta1) * z[n] + beta1 * x[n] for n in x})
    return ys, xs


def assert_close(got: Weights, wanted: Weights) -> None:
    for name, tensor in wanted.items():
        torch.testing.assert_close(got[name].double(), tensor, rtol=0, atol=2e-6)


def test_the_average_is_validated_saved_and_exported(
    make_trainer: Any, model_folder: str, write_rows: Any, tmp_path: Path
) -> None:
    data, saved = write_rows(count=21), SaveAt(3, tmp_path / "within.ckpt")
    last = ModelCheckpoint(tmp_path / "checkpoints", save_last=True)
    merger = AdapterMerger(tmp_path / "adapter")
    module, recorder = schedule_free_run(make_trainer, model_folder, data, saved, merger, last)
    ys, xs = averages_by_hand(recorder, warmup=2)
    assert len(xs) == 10
    assert max(float((ys[2][n] - xs[2][n]).abs().max()) for n in xs[2]) > 1e-4  # else this test would tell nothing

    # Validation before training, after steps 5 and 10.
    assert [len(recorder.validated)] == [3]
    for (loss, weights), wanted in zip(recorder.validated[1:], (xs[4], xs[9]), strict=True):
        assert_close(weights, wanted)
        assert loss > 0
    # A checkpoint within an epoch, and the last.
    within = torch.load(tmp_path / "within.ckpt", weights_only=True)
    assert_close(within["state_dict"], xs[2])
    assert_close(saved.training, ys[2])
    assert_same(within["training_weights"], saved.training)
    final = torch.load(last.last_model_path, weights_only=True)["state_dict"]
    assert_close(final, xs[9])
    # What is left in place and exported.
    assert_same(weights_of(module), final)
    adapter = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert_same({n.replace(".default", "").removeprefix("model."): p for n, p in final.items()}, adapter)


def test_the_loss_of_validation_is_that_of_the_checkpoint(
    make_trainer: Any, model_folder: str, write_rows: Any, tmp_path: Path
) -> None:
    data = write_rows(count=21)
    last = ModelCheckpoint(tmp_path / "checkpoints", save_last=True)
    _, recorder = schedule_free_run(make_trainer, model_folder, data, last)
    peft = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    again = make_module(model_folder, "schedule_free", peft=peft)
    rows = TextDataModule(data, micro_batch_size=4, val_fraction=0.2, max_length=96)
    (metrics,) = make_trainer().validate(again, rows, ckpt_path=last.last_model_path, verbose=False)
    assert metrics["val/loss"] == recorder.validated[-1][0]


def test_validating_and_saving_change_no_bit(
    make_trainer: Any, model_folder: str, write_rows: Any, tmp_path: Path
) -> None:
    data = write_rows(count=21)
    plain, _ = schedule_free_run(make_trainer, model_folder, data, limit_val_batches=0)
    busy, recorder = schedule_free_run(
        make_trainer,
        model_folder,
        data,
        ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1),
        val_check_interval=1,
    )
    assert len(recorder.validated) > 10
    assert_same(weights_of(busy), weights_of(plain))


def test_another_fit_starts_from_the_average(make_trainer: Any, model_folder: str, write_rows: Any) -> None:
    module, _ = schedule_free_run(make_trainer, model_folder, write_rows(count=21))
    average, recorder = weights_of(module), Recorder()
    trainer = make_trainer(max_steps=1, callbacks=[recorder], limit_val_batches=0)
    trainer.fit(module, TextDataModule(write_rows(count=21), micro_batch_size=4, max_length=96))
    assert_same(recorder.gradients_at[0], average)


# --- precision, packages, figures ----------------------------------------------------------------


def test_fused_and_clipped_in_mixed_precision(make_trainer: Any, model_folder: str, write_rows: Any) -> None:
    rows = TextDataModule(write_rows(), micro_batch_size=4)
    options = {"max_steps": 2, "gradient_clip_val": 1e-3}
    fused = make_module(model_folder, "adamw_fused")
    make_trainer(**options, precision="bf16-mixed").fit(fused, rows)
    plain = make_module(model_folder, "adamw_fused")
    plain.optimizer = read_optimizer(FRAGMENTS / "adamw_fused.yaml", fused=False)
    make_trainer(**options, precision="bf16-mixed").fit(plain, rows)
    for name, tensor in weights_of(plain).items():
        torch.testing.assert_close(weights_of(fused)[name], tensor, rtol=0, atol=1e-6)

    scaled = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(RecipeError, match="leaves gradients scaled until a fused optimizer's step"):
        make_trainer(**options, plugins=[scaled]).fit(make_module(model_folder, "adamw_fused"), rows)


def refused_in_float16(make_trainer: Any, model_folder: str, rows: str, strategy: Any) -> str:
    """What a fit of float16 weights under a gradient scaler says."""
    scaled = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))
    trainer = make_trainer(plugins=[scaled], strategy=strategy if strategy == "auto" else strategy())
    with pytest.raises(RecipeError) as refused:
        trainer.fit(CausalLM(model_folder, dtype="float16"), TextDataModule(rows))
    return str(refused.value)


@pytest.mark.parametrize("strategy", ["auto", FSDPStrategy])
def test_weights_in_float16_do_not_train_under_a_gradient_scaler(
    make_trainer: Any, model_folder: str, write_rows: Any, strategy: Any
) -> None:
    (said,) = on_ranks(1, refused_in_float16, make_trainer, model_folder, write_rows(), strategy)
    assert "weights in float16 are to train; set model.dtype=float32" in said


@pytest.mark.parametrize(("fragment", "package"), [("schedule_free", "schedulefree"), ("galore", "pytorch-optimizer")])
def test_a_missing_package(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, fragment: str, package: str
) -> None:
    class Missing:
        @staticmethod
        def find_spec(name: str, path: Any = None, target: Any = None) -> None:
            if name.split(".")[0] in ("schedulefree", "pytorch_optimizer"):
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    for module in list(sys.modules):
        if module.split(".")[0] in ("schedulefree", "pytorch_optimizer") or module.endswith(".galore"):
            monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(sys, "meta_path", [Missing, *sys.meta_path])
    monkeypatch.chdir(REPOSITORY)
    recipe = ("--config", "recipes/quickstart.yaml", "--config", f"recipes/optimizers/{fragment}.yaml")
    with pytest.raises(SystemExit) as stop:
        main(["fit", *recipe, "--print_config"])
    assert stop.value.code == 2
    wanted = f"optimizer: the package {package} is not installed; pip install -e '.[optimizers]'"
    assert wanted in capsys.readouterr().err


def test_a_package_of_no_extra(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setenv("LIT_FT_ALLOW_CODE", "lion_of_mine")
    with pytest.raises(SystemExit):
        main(["fit", "--config", "recipes/quickstart.yaml", "--optimizer", "lion_of_mine.Lion"])
    assert "optimizer: no module 'lion_of_mine' is installed; fix the class_path" in capsys.readouterr().err


def test_bytes_of_state_are_those_of_the_docs() -> None:
    table = (REPOSITORY / "docs" / "optimizers.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)\.yaml` \|.*\| ([\d.]+) \| ([\d.]+) \|$", table, re.MULTILINE)
    assert [name for name, _, _ in rows] == NAMES
    for name, *figures in rows:
        make = read_optimizer(FRAGMENTS / f"{name}.yaml")
        assert [f"{bytes_per_weight(make, lora):.2f}" for lora in (False, True)] == figures, name


def test_bytes_of_state_count_shared_tensors_once() -> None:
    optimizer = AdamW8bit([torch.nn.Parameter(torch.ones(64, 128)) for _ in range(2)])
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    # Two moments of a byte and a scale for each 256; two code books of 256 numbers for all.
    assert state_bytes(optimizer) == 2 * (2 * 8192 + 2 * 4 * 8192 // 256) + 2 * 4 * 256


def test_a_schedule_of_torch_is_said_to_step_per_epoch(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "lightning.pytorch")
    module = BoringModel()
    configured = configure_optimizers(module, partial(SGD, lr=0.1), partial(StepLR, step_size=2))
    assert isinstance(configured, dict)
    assert "interval" not in configured["lr_scheduler"]  # an epoch by default
    assert "lr_scheduler: StepLR steps once per epoch; those of lit_ft.schedules once per optimizer" in caplog.text
