"""Which part of training is going on, told from the actions that Lightning names to ``trainer.profiler``.

Callback hooks do not enclose the waiting for data, the other callbacks or the writing of a checkpoint; the profiler's
actions do. A profiler of the user's own goes on working: every action is passed on to it.
"""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import cache
from typing import Any, Literal

from lightning.pytorch import Callback
from lightning.pytorch.profilers import PassThroughProfiler, Profiler

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


@cache
def _told(action: str) -> tuple[Phase | None, bool, bool]:
    """The phase that an action is of, and whether validation begins or ends with it."""
    ending = action.rpartition(".")[2]
    phase = "callbacks" if action.startswith("[Callback]") else _BY_ENDING.get(ending)
    # Validation has no action of its own: it begins with the first of its hooks and ends with the strategy's.
    ends = ending == "on_validation_end" and action.startswith("[Strategy]")
    return phase, ending == "on_validation_start", ends


_STEP_HOOKS = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
)
_UNTOLD = (None, False, False)
_NOTHING = nullcontext("")


def _empty_actions(callbacks: Iterable[Callback]) -> frozenset[str]:
    """The actions of a step in which Lightning calls a hook that a callback does not have: most of all actions."""
    has: dict[str, bool] = {}
    for callback in callbacks:
        for hook in _STEP_HOOKS:
            action = f"[Callback]{callback.state_key}.{hook}"
            # Asked of the instance, as Lightning does: LambdaCallback puts its hooks there.
            found = getattr(getattr(callback, hook), "__func__", None) is not getattr(Callback, hook)
            has[action] = found or has.get(action, False)
    return frozenset(action for action, found in has.items() if not found)


class _Action:
    """What ``with`` enters: some hundreds a step, so no generator."""

    __slots__ = ("name", "profiler")

    def __init__(self, profiler: "PhaseProfiler", name: str) -> None:
        self.profiler, self.name = profiler, name

    def __enter__(self) -> str:
        self.profiler.start(self.name)
        return self.name

    def __exit__(self, _: Any, error: BaseException | None, __: Any) -> None:
        if error is not None and id(error) != self.profiler.error:
            self.profiler.error, self.profiler.failed_in = id(error), self.profiler.phase
        self.profiler.stop(self.name)


class PhaseProfiler(Profiler):
    """Tells listeners when another phase begins. An action within an action is its own: nothing is counted twice.

    Callbacks' hooks follow one another, and after the last of them Lightning names an action at once. So the phase
    ``callbacks`` ends with that, and not after each hook.
    """

    def __init__(self, inner: Profiler, empty: frozenset[str] = frozenset()) -> None:
        """Stand before a profiler.

        Args:
            inner: gets every action too.
            empty: actions in which nothing happens, and no phase begins.
        """
        super().__init__()
        self.inner = inner
        self._empty = empty
        self.listeners: list[Listener] = []
        self.phase: Phase = "other"
        self.failed_in: Phase | None = None
        """The phase in which the last error was raised; it has gone through those around it since."""
        self.error: int | None = None
        """The id of that error."""
        self._is_heard = not isinstance(inner, PassThroughProfiler)
        self._open: list[tuple[str, Phase]] = []
        self._next: Phase | None = None
        """The phase that goes on after the callbacks, unless another of them follows."""
        self._contexts: dict[str, Any] = {}
        self._validating = False

    def profile(self, action_name: str) -> Any:
        """A context in which the action goes on."""
        known = self._contexts.get(action_name)
        if known is None:
            known = _Action(self, action_name)
            if action_name in self._empty or _told(action_name) == _UNTOLD:
                known = _NOTHING
            self._contexts[action_name] = known
        if self._next is not None and known is _NOTHING and action_name not in self._empty:
            self._leave_callbacks()
        return self.inner.profile(action_name) if known is _NOTHING and self._is_heard else known

    def start(self, action_name: str) -> None:
        """An action begins, within those that are open."""
        if self._is_heard:
            self.inner.start(action_name)
        phase, begins, _ = _told(action_name)
        before = self.phase if self._next is None else self._next
        if phase == "callbacks":
            self._next = None
        elif self._next is not None:
            self._leave_callbacks()
        self._open.append((action_name, before))
        if begins:
            self._validating = True
        if before == "checkpoint":
            return
        if self._validating and phase != "checkpoint":
            phase = "validation"
        if phase is not None and phase != self.phase:
            self._switch(phase)

    def stop(self, action_name: str) -> None:
        """An action ends; those that began before the profiler stood here are not ours."""
        if self._open and self._open[-1][0] == action_name:
            phase = self._open.pop()[1]
            if self._validating:
                if _told(action_name)[2]:
                    self._validating, phase = False, "other"
                elif phase != "checkpoint":
                    phase = "validation"
            if phase != self.phase and self.phase == "callbacks":
                self._next = phase
            elif phase != self.phase:
                self._switch(phase)
        if self._is_heard:
            self.inner.stop(action_name)

    def _leave_callbacks(self) -> None:
        assert self._next is not None
        phase, self._next = self._next, None
        self._switch(phase)

    def _switch(self, phase: Phase) -> None:
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
        profiler = trainer.profiler = PhaseProfiler(profiler, _empty_actions(trainer.callbacks))
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
