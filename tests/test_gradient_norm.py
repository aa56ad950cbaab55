"""The gradient norm: in fp32, measured once for all who ask, and again once a gradient has changed."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lit_callbacks import SpikeGuard
from torch import Tensor, nn

from lit_ft import CausalLM, TextDataModule
from lit_ft import gradient_norm as gradients
from lit_ft.gradient_norm import GradientNorm, clip, gradient_norm


def parameters(*of: list[float], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    made = [nn.Parameter(torch.zeros(len(values), dtype=dtype)) for values in of]
    for parameter, values in zip(made, of, strict=True):
        parameter.grad = torch.tensor(values, dtype=dtype)
    return made


def test_norm_and_clipping_by_hand() -> None:
    made = parameters([3.0, 0.0], [4.0])
    norm = gradient_norm(made)
    assert float(norm) == 5.0
    clip(made, norm, 10.0)
    assert float(gradient_norm(made)) == 5.0
    clip(made, norm, 1.0)
    assert float(gradient_norm(made)) == pytest.approx(1.0, rel=1e-6)
    assert float(gradient_norm([])) == 0.0
    clip([], norm, 1.0)


def test_norm_of_half_precision_is_not_rounded_to_it() -> None:
    made = parameters([1.0] * 1000, [1.0], dtype=torch.bfloat16)
    assert float(gradient_norm(made)) == pytest.approx(1001**0.5, rel=1e-6)


def test_norm_of_double_precision_is_in_it() -> None:
    made = [*parameters([1.0, 1e-6], dtype=torch.float64), *parameters([0.0])]
    assert float(gradient_norm(made)) == pytest.approx((1 + 1e-12) ** 0.5, rel=1e-15)
    clip(made, gradient_norm(made), 0.5)
    assert float(gradient_norm(made)) == pytest.approx(0.5, rel=1e-5)


def test_measured_again_once_a_gradient_has_changed() -> None:
    made = parameters([3.0], [4.0])
    optimizer, measured = torch.optim.SGD(made, lr=0.1), []

    def measure(of: Sequence[nn.Parameter]) -> Tensor:
        measured.append(len(of))
        return gradient_norm(of)

    norm = GradientNorm()
    assert [float(norm.of(optimizer, measure)) for _ in range(3)] == [5.0] * 3
    assert measured == [2]
    made[0].grad.zero_()
    assert float(norm.of(optimizer, measure)) == 4.0
    made[1].grad = torch.tensor([2.0])
    assert float(norm.of(optimizer, measure)) == 2.0
    made[1].grad = None
    assert float(norm.of(optimizer, measure)) == 0.0
    assert measured == [2, 2, 2, 1]
    norm.forget()
    norm.of(optimizer, measure)
    assert len(measured) == 5


def test_one_measurement_a_step_for_spikes_log_and_clipping(
    make_trainer: Any, model_folder: str, write_rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = []
    plain = gradients.norms
    monkeypatch.setattr(gradients, "norms", lambda of: measured.append(len(of)) or plain(of))
    trainer = make_trainer(max_steps=3, gradient_clip_val=0.5, callbacks=[SpikeGuard()])
    trainer.fit(CausalLM(model_folder), TextDataModule(write_rows()))
    assert len(measured) == 3
    assert measured[0] > 0


def test_the_norm_of_a_skipped_step_is_logged(
    make_trainer: Any, model_folder: str, write_rows: Any, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    class Scales(Callback):
        """Makes gradients as given, 1 to begin with, and keeps what is logged of each step."""

        def __init__(self, *factors: float) -> None:
            self.factors, self.norms, self.logged = factors, [], []

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            gradients = [p.grad for p in pl_module.parameters() if p.grad is not None]
            for gradient in gradients:
                gradient.mul_(self.factors[trainer.global_step])
            self.norms.append(float(torch.cat([one.flatten() for one in gradients]).norm()))

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            self.logged.append(float(trainer.callback_metrics["train/grad_norm"]))

    scales, guard = Scales(math.inf, 1.0, 1.0, 1.0, 1e4), SpikeGuard(folder=tmp_path, warmup_steps=2)
    trainer = make_trainer(max_steps=5, gradient_clip_val=0.5, callbacks=[scales, guard])
    trainer.fit(CausalLM(model_folder), TextDataModule(write_rows()))
    assert guard.skipped_steps == 2
    assert scales.logged == pytest.approx(scales.norms, nan_ok=True)
    assert scales.logged[4] > 1e3
    assert not any("of the others" in str(warning.message) for warning in recwarn)
