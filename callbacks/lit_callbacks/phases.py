"""Current phase of training, derived from the actions that Lightning reports to ``trainer.profiler``.

Callback hooks do not enclose the wait for data, the other callbacks or the writing of a checkpoint; the profiler's
actions do. The user's own profiler keeps working: every action is passed on to it.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from inspect import ismethod
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.profilers import PassThroughProfiler, Profiler

from lit_callbacks.either_package import is_a
from lit_callbacks.internals.lightning_internals import attributes_of

Phase = Literal[
    "data", "generation", "forward", "backward", "optimizer", "callbacks", "other", "validation", "checkpoint"
]
Listener = Callable[[Phase], None]
"""Function that is called with the phase that begins."""

_BY_ENDING: dict[str, Phase] = {
    "train_dataloader_next": "data",
    "generation": "generation",
    "training_step": "forward",
    "forward": "forward",
    "backward": "backward",
    "optimizer_step": "optimizer",
    "optimizer_zero_grad": "optimizer",
    "configure_gradient_clipping": "optimizer",
    "lr_scheduler_step": "optimizer",
    "save_checkpoint": "checkpoint",
}


@cache
def _told(action: str) -> tuple[Phase | None, bool, bool]:
    """Phase of an action, and whether validation begins and ends with it."""
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


def _empty_actions(callbacks: Iterable[Callback]) -> frozenset[str]:
    """Actions of a step in which Lightning calls a hook that no callback implements: the majority of all actions."""
    has: dict[str, bool] = {}
    for callback in callbacks:
        for hook in _STEP_HOOKS:
            action = f"[Callback]{callback.state_key}.{hook}"
            # Looked up on the instance, as Lightning does: LambdaCallback sets its hooks there.
            method = getattr(callback, hook)
            is_implemented = not (ismethod(method) and method.__func__ is getattr(Callback, hook))
            has[action] = is_implemented or has.get(action, False)
    return frozenset(action for action, is_implemented in has.items() if not is_implemented)


class _Action:
    """Context manager of one action, entered some hundred times a step: no generator, and no avoidable call."""

    __slots__ = ("begins", "ends", "name", "phase", "profiler")

    def __init__(self, profiler: "PhaseProfiler", name: str) -> None:
        self.profiler, self.name = profiler, name
        self.phase, self.begins, self.ends = _told(name)

    def __enter__(self) -> str:
        profiler, phase = self.profiler, self.phase
        before = profiler.after_callbacks
        if before is None:
            before = profiler.phase
        elif phase == "callbacks":
            profiler.after_callbacks = None
        else:
            profiler.end_callbacks()
        profiler.open.append((self, before))
        if self.begins:
            profiler.validates = True
        if before != "checkpoint":
            if profiler.validates and phase != "checkpoint":
                phase = "validation"
            if phase is not None and phase != profiler.phase:
                profiler.switch(phase)
        return self.name

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        profiler = self.profiler
        if error is not None:
            profiler.note(error)
        if not profiler.open or profiler.open[-1][0] is not self:
            return  # it began before this profiler was installed
        phase = profiler.open.pop()[1]
        if profiler.validates:
            if self.ends:
                profiler.validates, phase = False, "other"
            elif phase != "checkpoint":
                phase = "validation"
        if phase != profiler.phase:
            if profiler.phase == "callbacks":
                profiler.after_callbacks = phase
            else:
                profiler.switch(phase)


class _Untold:
    """Context manager of an action that belongs to no phase; it ends the phase ``callbacks``."""

    __slots__ = ("profiler",)

    def __init__(self, profiler: "PhaseProfiler") -> None:
        self.profiler = profiler

    def __enter__(self) -> None:
        self.profiler.end_callbacks()

    def __exit__(self, *_: object) -> None:
        pass


class PhaseProfiler(Profiler):
    """Profiler that tells listeners when a phase begins. Time in nested actions counts for the inner action only.

    Callback hooks follow one another, and Lightning reports another action immediately after the last of them. So the
    phase ``callbacks`` ends with that action, and not after each hook.
    """

    def __init__(self, inner: Profiler, empty: frozenset[str]) -> None:
        """Wrap a profiler.

        Args:
            inner: the wrapped profiler, which gets every action too.
            empty: actions in which nothing happens and no phase begins.
        """
        super().__init__()
        self.inner = inner
        self._empty = empty
        self.listeners: list[Listener] = []
        self.phase: Phase = "other"
        self.failed_in: Phase | None = None
        """Phase in which the last error was raised, not the enclosing phases that it has passed through since."""
        self._error: int | None = None
        """Python ``id`` of that error."""
        self.open: list[tuple[_Action, Phase]] = []
        """Actions that have not ended, each with the phase that continues after it."""
        self.after_callbacks: Phase | None = None
        """Phase that continues after a callback hook, unless another hook follows."""
        self.validates = False
        """Whether validation is running; it has no action of its own."""
        self._context = cache(self._new_context)
        if is_a(inner, PassThroughProfiler):
            self.profile = self._context  # type: ignore[method-assign]

    def _new_context(self, action_name: str) -> Any:
        if action_name in self._empty:
            return nullcontext(action_name)
        return _Untold(self) if _told(action_name) == _UNTOLD else _Action(self, action_name)

    @contextmanager
    def profile(self, action_name: str) -> Iterator[str]:
        """Context manager of an action, for this profiler and the inner one."""
        with self._context(action_name), self.inner.profile(action_name):
            yield action_name

    def start(self, action_name: str) -> None:
        """Begin an action, nested in those that have not ended."""
        self._context(action_name).__enter__()
        self.inner.start(action_name)

    def stop(self, action_name: str) -> None:
        """End an action."""
        self.inner.stop(action_name)
        self._context(action_name).__exit__(None, None, None)

    def end_callbacks(self) -> None:
        """End the phase ``callbacks``, if it is still open: another action follows."""
        if self.after_callbacks is not None:
            phase, self.after_callbacks = self.after_callbacks, None
            self.switch(phase)

    def note(self, error: BaseException) -> None:
        """Record the phase of an error that leaves an action; the innermost action comes first."""
        if id(error) != self._error:
            self._error, self.failed_in = id(error), self.phase

    def switch(self, phase: Phase) -> None:
        """Begin a phase and tell the listeners."""
        self.phase = phase
        for listener in self.listeners:
            listener(phase)

    def summary(self) -> str:
        """Summary of the inner profiler."""
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

    def __del__(self) -> None:
        """Leave the inner profiler as it is: Lightning's would tear it down, and it still has a report to write."""

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # not set yet in a copy that is being made
            raise AttributeError(name)
        return getattr(self.inner, name)


def watch(trainer: Trainer, listener: Listener) -> None:
    """Call ``listener`` at the start of every phase from now on; several listeners share one profiler."""
    attributes = attributes_of(trainer)
    profiler = attributes.profiler
    if not isinstance(profiler, PhaseProfiler):
        profiler = attributes.profiler = PhaseProfiler(profiler, _empty_actions(attributes.callbacks))
    profiler.listeners.append(listener)


def unwatch(trainer: Trainer, listener: Listener) -> None:
    """Stop calling ``listener``; after the last one, the trainer gets its own profiler back."""
    attributes = attributes_of(trainer)
    profiler = attributes.profiler
    if not isinstance(profiler, PhaseProfiler) or listener not in profiler.listeners:
        return
    profiler.listeners.remove(listener)
    if not profiler.listeners:
        attributes.profiler = profiler.inner


def writing(trainer: Trainer, writer: str) -> AbstractContextManager[object]:
    """Context in which a callback writes a model: its time is that of a checkpoint, and no part of a step.

    Args:
        trainer: trainer of the run.
        writer: name of the callback, for reports of the user's own profiler.
    """
    return attributes_of(trainer).profiler.profile(f"{writer}.save_checkpoint")


def within_a_step(
    trainer: Trainer, module: LightningModule, phase: Literal["generation", "forward"]
) -> AbstractContextManager[object]:
    """Context in which a module does a part of a step outside of ``training_step``; in a validation it is a part of it.

    Args:
        trainer: trainer of the run.
        module: the module, for reports of the user's own profiler.
        phase: ``generation`` of what it then trains on, or a further ``forward`` pass, of a teacher or a reference.
    """
    return attributes_of(trainer).profiler.profile(f"[LightningModule]{type(module).__name__}.{phase}")


def failed_in(trainer: Trainer) -> Phase | None:
    """Phase in which the last error was raised; None where phases are not watched or nothing was raised."""
    profiler = attributes_of(trainer).profiler
    return profiler.failed_in if isinstance(profiler, PhaseProfiler) else None
