"""What callbacks measure on a device, against the wall clock and the allocator."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import CUDA, DEVICES, accelerator_of
from lightning.pytorch import Callback
from lit_callbacks import MemoryProfiler, ThroughputMonitor
from peft import LoraConfig

from lit_ft import CausalLM, TextDataModule

pytestmark = pytest.mark.slow

TINY = str(Path(__file__).parents[2] / "checkpoints" / "tiny-qwen2")
STEPS = 12


class WallClock(Callback):
    """Callback that takes the time of all steps but the first, with a synchronization before each reading."""

    def __init__(self, device: str) -> None:
        self.wait = torch.cuda.synchronize if device == "cuda" else lambda: None

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step in (1, STEPS):
            self.wait()
            self.started, self.seconds = time.perf_counter(), time.perf_counter() - getattr(self, "started", 0.0)


class Peak(Callback):
    """Callback that reads the largest peak of the allocator, which MemoryProfiler resets at the end of each phase."""

    def __init__(self) -> None:
        self.bytes = 0

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.bytes = max(self.bytes, torch.cuda.max_memory_allocated())


def fit(device: str, make_trainer: Any, data: str, callbacks: list[Callback], **options: Any) -> None:
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = make_trainer(
        accelerator=accelerator_of(device), max_steps=STEPS, callbacks=callbacks, log_every_n_steps=1
    )
    trainer.fit(CausalLM(TINY, peft=lora, **options), TextDataModule(data, micro_batch_size=4, shuffle=False))


@pytest.mark.parametrize("device", DEVICES)
def test_throughput_is_that_of_the_wall_clock(device: str, make_trainer: Any, write_rows: Any) -> None:
    monitor, clock = ThroughputMonitor(skip_steps=1), WallClock(device)
    fit(device, make_trainer, write_rows(count=48), [monitor, clock])
    tolerance = 0.05 if device == "cuda" else 0.2  # steps of milliseconds, on processors that others use too
    assert monitor.summary["step_seconds"] == pytest.approx(clock.seconds / (STEPS - 1), rel=tolerance)


@pytest.mark.parametrize("device", [CUDA])
def test_peak_memory_is_that_of_the_allocator(device: str, make_trainer: Any, write_rows: Any, tmp_path: Path) -> None:
    """Two runs of the same steps: reading the peak for each phase resets it."""
    data, peak = write_rows(count=48), Peak()
    profiler = MemoryProfiler(tmp_path, sample_steps=(), picture=False)
    fit(device, make_trainer, data, [profiler])
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    fit(device, make_trainer, data, [peak])
    largest = max(phase.get("peak_allocated", 0.0) for phase in profiler.peaks.values()) * 2**20
    assert largest == pytest.approx(peak.bytes, rel=0.02)


@pytest.mark.parametrize("device", [CUDA])
def test_a_row_that_is_too_large_ends_in_a_page(
    device: str, make_trainer: Any, write_rows: Any, tmp_path: Path
) -> None:
    data = write_rows([{"instruction": "a", "input": "", "output": "red green blue " * 40_000}])
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, (torch.cuda.memory_reserved() + 2**29) / total))
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = make_trainer(
        accelerator=accelerator_of(device), max_steps=1, callbacks=[MemoryProfiler(tmp_path / "memory", picture=False)]
    )
    try:
        with pytest.raises(torch.OutOfMemoryError):
            trainer.fit(CausalLM(TINY, peft=lora), TextDataModule(data, max_length=100_000, micro_batch_size=1))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    page = (tmp_path / "memory" / "out_of_memory_rank0.md").read_text()
    assert "activations" in page
