"""Time that ``trainer.max_time``, or the duration of a ``Timer``, leaves a run."""

from datetime import timedelta

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Timer
from lit_callbacks.internals.lightning_internals import attributes_of

MaxTime = str | timedelta | dict[str, int] | None
"""Type of ``trainer.max_time``."""


def duration(limit: MaxTime) -> float | None:
    """Seconds of a limit; None without one.

    Raises:
        MisconfigurationException: it is a string other than ``DD:HH:MM:SS``.
    """
    return Timer(duration=limit).time_remaining()


def time_left(trainer: Trainer) -> float | None:
    """Seconds until a timer of the trainer ends training, below 0 where it has; None without a timer."""
    timers = (one for one in attributes_of(trainer).callbacks if isinstance(one, Timer))
    return min((seconds for timer in timers if (seconds := timer.time_remaining()) is not None), default=None)
