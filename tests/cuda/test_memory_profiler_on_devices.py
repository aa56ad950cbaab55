"""``MemoryProfiler`` on a GPU, against its allocator."""

from pathlib import Path
from typing import Any

import pytest
import torch
from devices import CUDA, fit_tiny
from lightning.pytorch import Callback
from lit_callbacks import MemoryProfiler

pytestmark = pytest.mark.slow

STEPS = 12


class Peak(Callback):
    """Callback that reads the largest peak of the allocator, which MemoryProfiler resets at the end of each phase."""

    def __init__(self) -> None:
        self.bytes = 0

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.bytes = max(self.bytes, torch.cuda.max_memory_allocated())


@pytest.mark.parametrize("device", [CUDA])
def test_peak_memory_is_that_of_the_allocator(device: str, make_trainer: Any, write_rows: Any, tmp_path: Path) -> None:
    """Two runs of the same steps: reading the peak for each phase resets it."""
    data, peak = write_rows(count=48), Peak()
    profiler = MemoryProfiler(tmp_path, sample_steps=(), picture=False)
    fit_tiny(device, make_trainer, data, STEPS, [profiler])
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    fit_tiny(device, make_trainer, data, STEPS, [peak])
    largest = max(phase["peak_allocated_mib"] for phase in profiler.peaks.values()) * 2**20
    assert largest == pytest.approx(peak.bytes, rel=0.02)


@pytest.mark.parametrize("device", [CUDA])
def test_a_row_that_is_too_large_ends_in_a_page(
    device: str, make_trainer: Any, write_rows: Any, tmp_path: Path
) -> None:
    data = write_rows([{"instruction": "a", "input": "", "output": "red green blue " * 40_000}])
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, (torch.cuda.memory_reserved() + 2**29) / total))
    profiler = MemoryProfiler(tmp_path / "memory", picture=False)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            fit_tiny(device, make_trainer, data, 1, [profiler], max_length=100_000)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    page = (tmp_path / "memory" / "out_of_memory_rank0.md").read_text()
    assert "activations" in page
