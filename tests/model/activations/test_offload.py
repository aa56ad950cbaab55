"""Offload of activations to host memory: what is copied, when it is back, and that no number changes."""

from collections import deque
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from one_process import Numbers, numbers
from peft import LoraConfig
from ranks import on_ranks
from torch import nn

from lit_ft import CausalLM, TextDataModule
from lit_ft.model.activations import offload
from lit_ft.model.activations.offload import ActivationsOnHost, CopyStream
from lit_ft.strategies import FSDPStrategy

pytestmark = pytest.mark.slow

LORA = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")


class LateCopies(CopyStream):
    """Copies as late as a GPU may make them: each when something waits for it, with those started before."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.pending: deque[tuple[torch.Tensor, torch.Tensor]] = deque()
        self.to_host: list[torch.Tensor] = []
        self.started = self.done = 0
        self.log: list[str] = []
        self.sources: dict[int, torch.Tensor] = {}

    def start(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        if source.data_ptr() not in self.sources:
            self.to_host.append(source)
            self.sources[target.data_ptr()] = target
        target.zero_()  # what it holds before the copy is wrong
        self.pending.append((target, source))
        self.started += 1
        self.log.append(f"start {self.started}")
        return self.started

    def wait(self, end: Any) -> None:
        while self.done < end:
            target, source = self.pending.popleft()
            target.copy_(source)
            self.done += 1
        self.log.append(f"wait {end}")


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> LateCopies:
    late = LateCopies()
    monkeypatch.setattr(offload, "copy_stream", lambda device: late)
    return late


def test_copies_run_beside_computation(copies: LateCopies) -> None:
    """A copy to the host has the time of two layers, and one to the device that of one; the last two never leave."""
    inputs = torch.linspace(-1, 1, 12).requires_grad_()
    with ActivationsOnHost():
        loss = inputs.exp().exp().exp().exp().sum()
    assert copies.log == ["start 1", "start 2", "start 3", "wait 1", "start 4", "wait 2"]
    copies.log.clear()
    loss.backward()  # 5 and 6 bring back 2 and 1, when 3 is used
    assert copies.log == ["wait 4", "start 5", "wait 3", "start 6", "wait 5", "wait 6"]


def test_nothing_is_brought_back_twice(
    copies: LateCopies, make_trainer: Any, model_folder: str, write_rows: Any
) -> None:
    """Nor in vain but for a few: operators ask for what they saved in the order of saving, so not the last first."""
    numbers(make_trainer, model_folder, write_rows(), peft=LORA)
    assert copies.started == 0
    numbers(make_trainer, model_folder, write_rows(), peft=LORA, activation_offload=True)
    saved = len(copies.to_host)
    assert saved > 300
    assert saved < copies.started <= 2 * saved


def test_a_tensor_can_be_needed_twice(copies: LateCopies) -> None:
    inputs = torch.linspace(-1, 1, 12).requires_grad_()
    with ActivationsOnHost():
        loss = inputs.exp().exp().exp().exp().sum()
    first, second = (torch.autograd.grad(loss, inputs, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    assert first.abs().sum() > 0


@pytest.mark.parametrize("peft", [LORA, None], ids=["lora", "full"])
@pytest.mark.parametrize("checkpointing", [False, True, "selective"])
def test_offloaded_activations_change_no_bit(
    copies: LateCopies, make_trainer: Any, model_folder: str, write_rows: Any, peft: Any, checkpointing: Any
) -> None:
    options = {"peft": peft, "gradient_checkpointing": checkpointing}
    plain = numbers(make_trainer, model_folder, write_rows(), **options)
    offloaded = numbers(make_trainer, model_folder, write_rows(), **options, activation_offload=True)
    assert copies.started > len(copies.to_host) > 0
    assert offloaded.losses == plain.losses
    assert all(torch.equal(a, b) for a, b in zip(offloaded.gradients, plain.gradients, strict=True))


@pytest.mark.parametrize("trains", [True, False])
def test_weights_stay_where_they_are(copies: LateCopies, trains: bool) -> None:
    layer = nn.Linear(8, 16).requires_grad_(trains)
    inputs = torch.randn(3, 8, requires_grad=True)
    with ActivationsOnHost():
        layer(inputs * 2).exp().sum().backward()
    # Of the product its inputs where the weight trains; what exp gave.
    assert [tuple(t.shape) for t in copies.to_host] == ([(3, 8), (3, 16)] if trains else [(3, 16)])


def test_with_checkpointing_only_inputs_of_layers_go(
    copies: LateCopies, make_trainer: Any, model_folder: str, write_rows: Any
) -> None:
    numbers(make_trainer, model_folder, write_rows(), peft=LORA, gradient_checkpointing=True, activation_offload=True)
    hidden = [tensor for tensor in copies.to_host if tensor.dim() == 3 and tensor.shape[-1] == 48]
    layers, steps = 2, 3
    last_norm = 2  # its inputs, and what it has made of them
    assert len(hidden) == steps * (layers + last_norm)


def sharded(model_folder: str, rows: str, is_offloaded: bool, copies: LateCopies) -> tuple[list[float], set[Any]]:
    """Losses, and shapes of weights that went to the host's memory, either way round."""
    found = Numbers()
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=FSDPStrategy(),
        max_steps=2,
        callbacks=[found],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    module = CausalLM(model_folder, activation_offload=is_offloaded)
    trainer.fit(module, TextDataModule(rows, micro_batch_size=4, shuffle=False))
    weights = {tuple(p.shape) for p in module.parameters()}
    return found.losses, {tuple(t.shape) for t in copies.to_host} & (weights | {shape[::-1] for shape in weights})


@pytest.mark.processes
def test_sharded_weights_stay_too(model_folder: str, write_rows: Any, copies: LateCopies) -> None:
    rows = write_rows()
    plain, offloaded = (on_ranks(2, sharded, model_folder, rows, on, copies) for on in (False, True))
    assert plain == offloaded == [(losses, set()) for losses, _ in plain]


def test_offloading_says_where_it_is_of_no_use(
    make_trainer: Any, model_folder: str, write_rows: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "lightning.pytorch"):
        numbers(make_trainer, model_folder, write_rows(), activation_offload=True)
    assert "(cpu) lie in the host's memory anyway; copying them only costs time here" in caplog.text


@pytest.mark.parametrize("checkpointing", [True, False])
def test_compiled_layers_offload_too(
    copies: LateCopies, make_trainer: Any, model_folder: str, write_rows: Any, checkpointing: bool
) -> None:
    options: dict[str, Any] = {"peft": LORA, "gradient_checkpointing": checkpointing}
    plain = numbers(make_trainer, model_folder, write_rows(), **options)
    options |= {"activation_offload": True, "compile": "aot_eager"}
    both = numbers(make_trainer, model_folder, write_rows(), **options)
    assert both.losses == pytest.approx(plain.losses, rel=1e-6)
    for ours, wanted in zip(both.gradients, plain.gradients, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-6)
