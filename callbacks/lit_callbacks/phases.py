"""Which part of training is going on, told from the actions that Lightning names to ``trainer.profiler``.

Callback hooks do not enclose the waiting for data, the other callbacks or the writing of a checkpoint; the profiler's
actions do. A profiler of the user's own goes on working: every action is passed on to it.
"""

import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal

from lightning.pytorch.profilers import Profiler

Phase = Literal["data", "forward", "backward", "optimizer", "callbacks", "other", "validation", "checkpoint"]
Listener = Callable[[Phase], None]
"""Called with the phase that begins."""

_BY_ENDING: dict[str, Phase] = {
    "train_dataloader_next": "data",
    "training_step": "forward",
    "backward": "backward",
    "optimizer_step": "optimizer",
    "optimizer_zero_grad": "optimizer",
    "configure_gradient_clipping": "optimizer",
    "lr_scheduler_step": "optimizer",
    "save_checkpoint": "checkpoint",
}


@lru_cache(maxsize=4096)
def _named(action: str) -> Phase | None:
    if action.startswith("[Callback]"):
        return "callbacks"
    return _BY_ENDING.get(action.rpartition(".")[2])


@lru_cache(maxsize=4096)
def _ending(action: str) -> str:
    return action.rpartition(".")[2]


class PhaseProfiler(Profiler):
    """Tells listeners when another phase begins. An action within an action is its own: nothing is counted twice."""

    def __init__(self, inner: Profiler) -> None:
        """Stand before a profiler.

        Args:
            inner: gets every action too.
        """
        super().__init__()
        self.inner = inner
        self.listeners: list[Listener] = []
        self.phase: Phase = "other"
        self.failed_in: Phase | None = None
        """The phase in which the last error was raised; it has gone through those around it since."""
        self._error: int | None = None
        self._open: list[tuple[str, Phase]] = []
        self._validating = False

    def start(self, action_name: str) -> None:
        """An action begins, within those that are open."""
        self.inner.start(action_name)
        self._open.append((action_name, self.phase))
        if _ending(action_name) == "on_validation_start":
            self._validating = True
        phase = _named(action_name) or self.phase
        if self.phase == "checkpoint" or (self._validating and phase != "checkpoint"):
            phase = "checkpoint" if self.phase == "checkpoint" else "validation"
        self._switch(phase)

    def stop(self, action_name: str) -> None:
        """An action ends; those that began before the profiler stood here are not ours."""
        if (error := sys.exc_info()[1]) is not None and id(error) != self._error:
            self._error, self.failed_in = id(error), self.phase
        if self._open and self._open[-1][0] == action_name:
            _, phase = self._open.pop()
            # Validation has no action of its own: it ends with the last of its hooks, the strategy's.
            if action_name.startswith("[Strategy]") and _ending(action_name) == "on_validation_end":
                self._validating, phase = False, "other"
            self._switch(phase if not self._validating or phase == "checkpoint" else "validation")
        self.inner.stop(action_name)

    def _switch(self, phase: Phase) -> None:
        if phase != self.phase:
            self.phase = phase
            for listener in self.listeners:
                listener(phase)

    def summary(self) -> str:
        """The inner profiler's."""
        return self.inner.summary()

    def describe(self) -> None:
        """Let the inner profiler describe itself."""
        self.inner.describe()

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        """Set the inner profiler up."""
        self.inner.setup(stage, local_rank, log_dir)

    def teardown(self, stage: str | None) -> None:
        """Tear the inner profiler down."""
        self.inner.teardown(stage)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)


def watch(trainer: Any, listener: Listener) -> None:
    """Tell ``listener`` of every phase from now on; several listeners share one profiler."""
    profiler = trainer.profiler
    if not isinstance(profiler, PhaseProfiler):
        profiler = trainer.profiler = PhaseProfiler(profiler)
    profiler.listeners.append(listener)


def unwatch(trainer: Any, listener: Listener) -> None:
    """Leave it alone again; the last listener gives the trainer its own profiler back."""
    profiler = trainer.profiler
    if not isinstance(profiler, PhaseProfiler) or listener not in profiler.listeners:
        return
    profiler.listeners.remove(listener)
    if not profiler.listeners:
        trainer.profiler = profiler.inner


def failed_in(trainer: Any) -> Phase | None:
    """The phase in which the last error was raised, where phases are watched."""
    profiler = trainer.profiler
    return profiler.failed_in if isinstance(profiler, PhaseProfiler) else None
