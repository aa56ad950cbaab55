"""Points in time that are cheap to take: of this process, or of a CUDA stream."""

import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from lit_callbacks.phases import Phase


class Clock(Protocol):
    """Takes points in time and tells later how far they are apart."""

    def now(self) -> Any:
        """A point in time."""

    def seconds(self, start: Any, end: Any) -> float:
        """Between two points that have passed."""

    def has_passed(self, point: Any) -> bool:
        """Whether the device has come to it."""


class HostClock:
    """The process's own."""

    def __init__(self) -> None:
        """Start: its points are seconds of ``time.perf_counter``."""
        self.now = time.perf_counter

    def seconds(self, start: float, end: float) -> float:
        """Between them."""
        return end - start

    def has_passed(self, point: float) -> bool:
        """Always: there is no queue."""
        return True


class CudaClock:
    """Events of the current CUDA stream: what the device does, however far ahead of it the process runs."""

    def now(self) -> torch.cuda.Event:
        """An event that is recorded and not waited for."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Between them on the device."""
        return start.elapsed_time(end) / 1000

    def has_passed(self, point: torch.cuda.Event) -> bool:
        """Asked for, not waited for."""
        return point.query()


def clock_of(device: torch.device) -> Clock:
    """CUDA's events where there is CUDA, else the process's clock."""
    return CudaClock() if device.type == "cuda" else HostClock()


class PhaseTimer:
    """Stretches of time, each of one phase, without gap or overlap."""

    def __init__(self, clock: Clock) -> None:
        """Start in phase ``other``.

        Args:
            clock: takes the time.
        """
        self.clock = clock
        self._now = clock.now
        self._phase: Phase = "other"
        self._since = self._now()
        self._stretches: list[tuple[Phase, Any, Any]] = []

    def switch(self, phase: Phase) -> None:
        """Another phase begins."""
        now = self._now()
        self._stretches.append((self._phase, self._since, now))
        self._phase, self._since = phase, now

    def cut(self) -> list[tuple[Phase, Any, Any]]:
        """The stretches since the last cut; the phase goes on."""
        self.switch(self._phase)
        stretches, self._stretches = self._stretches, []
        return stretches

    def seconds(self, stretches: Sequence[tuple[Phase, Any, Any]]) -> dict[Phase, float] | None:
        """Seconds by phase; None while the device has not come to the end of them."""
        if not self.clock.has_passed(stretches[-1][2]):
            return None
        total: dict[Phase, float] = {}
        for phase, start, end in stretches:
            total[phase] = total.get(phase, 0.0) + self.clock.seconds(start, end)
        return total
