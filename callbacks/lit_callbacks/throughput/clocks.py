"""Low-overhead timers: host clock, or CUDA events."""

import time
from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch

from lit_callbacks.phases import Phase

Point = TypeVar("Point")
"""A point in time, as a clock records it."""


class Clock(Protocol[Point]):
    """Clock that records points in time and later returns the seconds between two of them."""

    def now(self) -> Point:
        """Record a point in time."""

    def seconds(self, start: Point, end: Point) -> float:
        """Seconds between two points that the device has reached."""

    def has_passed(self, point: Point) -> bool:
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


def timer_of(device: torch.device) -> "PhaseTimer[Any]":
    """Timer with CUDA events for a CUDA device, else with the host clock."""
    return PhaseTimer(CudaClock()) if device.type == "cuda" else PhaseTimer(HostClock())


Interval = tuple[Phase, Point, Point]
"""Phase, start and end."""


class PhaseTimer(Generic[Point]):
    """Timer of phases: intervals of one phase each, without gaps or overlaps."""

    def __init__(self, clock: Clock[Point]) -> None:
        """Start in phase ``other``.

        Args:
            clock: clock that records the points in time.
        """
        self.clock = clock
        self._now = clock.now
        self._phase: Phase = "other"
        self._since = self._now()
        self._intervals: list[Interval[Point]] = []

    def switch(self, phase: Phase) -> None:
        """Begin a phase."""
        now = self._now()
        self._intervals.append((self._phase, self._since, now))
        self._phase, self._since = phase, now

    def take_intervals(self) -> list[Interval[Point]]:
        """Intervals since the last call; the current phase continues."""
        self.switch(self._phase)
        intervals, self._intervals = self._intervals, []
        return intervals

    def seconds(self, intervals: Sequence[Interval[Point]]) -> dict[Phase, float] | None:
        """Seconds by phase; None until the device has reached the end of the intervals."""
        if not self.clock.has_passed(intervals[-1][2]):
            return None
        total: dict[Phase, float] = {}
        for phase, start, end in intervals:
            total[phase] = total.get(phase, 0.0) + self.clock.seconds(start, end)
        return total
