"""Low-overhead timers: host clock, or CUDA events."""

import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from lit_callbacks.phases import Phase


class Clock(Protocol):
    """Clock that records points in time and later returns the seconds between two of them."""

    def now(self) -> Any:
        """Record a point in time."""

    def seconds(self, start: Any, end: Any) -> float:
        """Seconds between two points that the device has reached."""

    def has_passed(self, point: Any) -> bool:
        """Whether the device has reached a point."""


class HostClock:
    """Clock of this process."""

    def __init__(self) -> None:
        """Use ``time.perf_counter``: a point is a time in seconds."""
        self.now = time.perf_counter

    def seconds(self, start: float, end: float) -> float:
        """Seconds between two points."""
        return end - start

    def has_passed(self, point: float) -> bool:
        """Always true: the host has no queue."""
        return True


class CudaClock:
    """Clock of the current CUDA stream: events measure the device's time, however far ahead the process is."""

    def now(self) -> torch.cuda.Event:
        """Record an event in the stream, without a synchronization."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Seconds between two events on the device."""
        return start.elapsed_time(end) / 1000

    def has_passed(self, point: torch.cuda.Event) -> bool:
        """Whether the device has reached an event, without a synchronization."""
        return point.query()


def clock_of(device: torch.device) -> Clock:
    """CUDA events for a CUDA device, else the host clock."""
    return CudaClock() if device.type == "cuda" else HostClock()


class PhaseTimer:
    """Timer of phases: intervals of one phase each, without gaps or overlaps."""

    def __init__(self, clock: Clock) -> None:
        """Start in phase ``other``.

        Args:
            clock: clock that records the points in time.
        """
        self.clock = clock
        self._now = clock.now
        self._phase: Phase = "other"
        self._since = self._now()
        self._stretches: list[tuple[Phase, Any, Any]] = []

    def switch(self, phase: Phase) -> None:
        """Begin a phase."""
        now = self._now()
        self._stretches.append((self._phase, self._since, now))
        self._phase, self._since = phase, now

    def cut(self) -> list[tuple[Phase, Any, Any]]:
        """Intervals since the last cut, as phase, start and end; the current phase continues."""
        self.switch(self._phase)
        stretches, self._stretches = self._stretches, []
        return stretches

    def seconds(self, stretches: Sequence[tuple[Phase, Any, Any]]) -> dict[Phase, float] | None:
        """Seconds by phase; None until the device has reached the end of the intervals."""
        if not self.clock.has_passed(stretches[-1][2]):
            return None
        total: dict[Phase, float] = {}
        for phase, start, end in stretches:
            total[phase] = total.get(phase, 0.0) + self.clock.seconds(start, end)
        return total
