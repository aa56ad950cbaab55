"""``ThroughputMonitor`` on a device, against the wall clock."""

import time
from typing import Any

import pytest
import torch
from devices import DEVICES, fit_tiny
from lightning.pytorch import Callback
from lit_callbacks import ThroughputMonitor

pytestmark = pytest.mark.slow

STEPS = 12


class WallClock(Callback):
    """Callback that takes the time of all steps but the first, with a synchronization before each reading."""

    def __init__(self, device: str) -> None:
        self.wait = torch.cuda.synchronize if device == "cuda" else lambda: None

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step in (1, STEPS):
            self.wait()
            self.started, self.seconds = time.perf_counter(), time.perf_counter() - getattr(self, "started", 0.0)


@pytest.mark.parametrize("device", DEVICES)
def test_throughput_is_that_of_the_wall_clock(device: str, make_trainer: Any, write_rows: Any) -> None:
    monitor, clock = ThroughputMonitor(skip_steps=1), WallClock(device)
    fit_tiny(device, make_trainer, write_rows(count=48), STEPS, [monitor, clock])
    tolerance = 0.05 if device == "cuda" else 0.2  # steps of milliseconds, on processors that others use too
    assert monitor.summary["step_seconds"] == pytest.approx(clock.seconds / (STEPS - 1), rel=tolerance)
