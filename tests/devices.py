"""Devices that the tests of ``tests/cuda`` run on: their code on a CPU in every run, and their claims on a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from peft import LoraConfig
from torch.utils._python_dispatch import TorchDispatchMode

from lit_ft import CausalLM, TextDataModule

TINY = str(Path(__file__).parents[1] / "checkpoints" / "tiny-qwen2")
CUDA = pytest.param("cuda", marks=pytest.mark.cuda)
DEVICES = ["cpu", CUDA]
"""Values of a parameter ``device``."""


def cases(on_cpu: dict[str, Any], on_cuda: dict[str, Any]) -> list[Any]:
    """Values of ``(device, case)``: few small cases for a CPU, and those that need a GPU."""
    small = [pytest.param("cpu", case, id=f"cpu-{name}") for name, case in on_cpu.items()]
    large = [pytest.param("cuda", c, id=f"cuda-{name}", marks=pytest.mark.cuda) for name, c in on_cuda.items()]
    return small + large


def accelerator_of(device: str) -> str:
    """Lightning's name of a device."""
    return {"cuda": "gpu"}.get(device, device)


def on(device: str, batch: Any) -> Any:
    """A packed batch with its tensors on a device."""
    return {name: v.to(device) if isinstance(v, torch.Tensor) else v for name, v in batch.items()}


def relative_distance(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative L2 distance, computed in fp64 on the CPU."""
    got, wanted = got.detach().double().cpu(), wanted.detach().double().cpu()
    return float((got - wanted).norm() / wanted.norm())


class Calls(TorchDispatchMode):
    """Context manager that lists the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))

    def count(self, *parts: str) -> int:
        """Number of operators whose names hold all parts, and no ``backward``."""
        return sum(all(part in name for part in parts) and "backward" not in name for name in self.names)


@contextmanager
def synchronizations_are_errors(device: str) -> Iterator[None]:
    """Context in which CUDA raises where the host waits for the device; nothing on a CPU, which does not wait."""
    if device != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def fit_tiny(
    device: str, make_trainer: Any, data: str, steps: int, callbacks: list[Callback], max_length: int = 256
) -> None:
    """Fit LoRA on tiny-qwen2, in fp32, four rows at a time."""
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    where: dict[str, Any] = {"accelerator": accelerator_of(device), "max_steps": steps, "log_every_n_steps": 1}
    rows = TextDataModule(data, micro_batch_size=4, shuffle=False, max_length=max_length)
    make_trainer(**where, callbacks=callbacks).fit(CausalLM(TINY, peft=lora), rows)


class WithoutWaiting(Callback):
    """Callback for which waiting for the device is an error from the end of a step to that of the next, after two."""

    def __init__(self, device: str) -> None:
        self.device, self.steps = device, 0
        self.context: Any = nullcontext()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.context.__exit__(None, None, None)
        self.steps += 1
        is_followed = 1 < trainer.global_step < trainer.max_steps
        self.context = synchronizations_are_errors(self.device if is_followed else "cpu")
        self.context.__enter__()

    def on_exception(self, *_: Any) -> None:
        self.context.__exit__(None, None, None)
