"""Stop on Ctrl-C or SIGTERM without losing anything."""

import os
import signal
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

SAME_SIGNAL_SECONDS = 1.0
"""A signal that comes again sooner is the same one: launchers and schedulers may send it twice."""


class StopRequested(Exception):
    """Raised out of ``trainer.fit`` once the run is saved."""

    def __init__(self, signal_number: int, checkpoint: str) -> None:
        """Keep what a command line reports.

        Args:
            signal_number: the signal that asked to stop.
            checkpoint: path of the file that ``fit(ckpt_path=...)`` resumes from.
        """
        super().__init__(f"stopped by {signal.Signals(signal_number).name}; saved {checkpoint}")
        self.signal_number = signal_number
        self.checkpoint = checkpoint

    @property
    def exit_code(self) -> int:
        """128 + signal, as shells have it: 130 for Ctrl-C, 143 for SIGTERM."""
        return 128 + self.signal_number


class StoppedAtOnce(SystemExit):
    """Raised in the main thread by a second signal, and by the first where there is nothing to save."""

    def __init__(self, signal_number: int, reason: str) -> None:
        """Exit with 128 + signal.

        Args:
            signal_number: the signal.
            reason: why nothing is saved.
        """
        super().__init__(128 + signal_number)
        self.exit_code = 128 + signal_number
        self.reason = f"stopped at once by {signal.Signals(signal_number).name} ({reason})"


class GracefulStop(Callback):
    """Finish the optimizer step, save a checkpoint, then stop, when asked to by SIGINT or SIGTERM.

    A signal sets a flag. The ranks agree on it at the end of each optimizer step and nowhere else, whichever got the
    signal: no collective runs in a signal handler, and no half-accumulated gradient is lost, so that a resumed run
    equals one that was not stopped. Validation in a ``fit`` is finished first. Before the first step, and in
    ``validate``, ``test`` and ``predict``, there is nothing to save: the process ends at once. After the last step the
    run finishes what it writes at its end. A second signal ends the process at once, always.

    From ``setup`` to ``teardown`` Lightning's own handler of SIGTERM, which broadcasts, is out of use; SLURM's signal
    to requeue is answered, by Lightning, at the end of an optimizer step.
    """

    def __init__(self, checkpoint: str | Path | None = None) -> None:
        """Choose where to save.

        Args:
            checkpoint: the file to write; None is ``last.ckpt`` in the checkpoint callback's folder, or in
                ``trainer.default_root_dir`` where there is none.
        """
        self.checkpoint = checkpoint
        self._trainer: Trainer
        self._previous: dict[int, Any] = {}
        self._reset()

    def _reset(self) -> None:
        self._received: int | None = None
        self._received_at = 0.0
        self._process = os.getpid()
        self._stop: StopRequested | None = None
        self._is_training = self._is_finishing = False
        self._step = 0

    # --- signals -------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take over the signals."""
        if self._previous:
            return
        self._reset()
        self._trainer = trainer
        if threading.current_thread() is not threading.main_thread():
            rank_zero_warn("GracefulStop sees no signals: training runs outside the main thread")
            return
        # Lightning's SIGTERM handler broadcasts, whatever the other ranks do at that moment, and its handler of SLURM's
        # signal saves within an optimizer step. There is no public way to leave them out.
        trainer._signal_connector.register_signal_handlers = _nothing  # type: ignore[method-assign]
        for number in {signal.SIGINT, signal.SIGTERM, _requeue_signal(trainer) or signal.SIGTERM}:
            self._previous[number] = signal.signal(number, self._receive)

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if self._previous:
            vars(self._trainer._signal_connector).pop("register_signal_handlers", None)
        self._previous = {}

    def _receive(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if os.getpid() != self._process:  # a worker that was forked from this process ends with it
            return
        if number == _requeue_signal(self._trainer):
            self._received = self._received or number
            return
        is_first = self._received in (None, _requeue_signal(self._trainer))
        if not is_first and now - self._received_at < SAME_SIGNAL_SECONDS:
            return
        if (reason := self._reason_to_stop_now(is_first)) is not None:
            stop = StoppedAtOnce(number, reason)
            self._say(stop.reason)
            raise stop
        self._received, self._received_at = number, now
        self._say(f"{signal.Signals(number).name}: {self._plan()} (again: stop now)")

    def _reason_to_stop_now(self, is_first: bool) -> str | None:
        if not is_first:
            return "the second signal; what was not saved is lost"
        if self._trainer.state.fn != TrainerFn.FITTING:
            return "there is nothing to save"
        return None if self._is_training else "before the first step there is nothing to save"

    def _plan(self) -> str:
        if self._is_finishing:
            return "the last step is done; finishing what the run writes at its end"
        if self._trainer.state.stage == "validate":
            return "finishing validation and an optimizer step, saving, then stopping"
        return "finishing this optimizer step, saving, then stopping"

    def _say(self, text: str) -> None:
        # Not print: the main thread may be within one.
        if self._trainer.is_global_zero:
            os.write(2, f"\n{text}\n".encode())

    # --- places to stop ------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note from which step training goes on."""
        self._step = trainer.global_step

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Stop before the next batch."""
        self._is_training = True
        self._leave()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save here if any rank was asked to stop, and the optimizer has just stepped."""
        if trainer.global_step == self._step:  # a gradient is half accumulated
            return
        self._step = trainer.global_step
        if (number := self._agreed_signal(trainer)) == _requeue_signal(trainer):
            self._received = None
            trainer._signal_connector._slurm_sigusr_handler_fn(number, None)  # type: ignore[arg-type]
        elif number:
            path = str(self.checkpoint or self._default_path(trainer))
            if isinstance(trainer.checkpoint_callback, ModelCheckpoint):
                trainer.checkpoint_callback.last_model_path = path  # else the resumed run writes last-v1.ckpt beside it
            trainer.save_checkpoint(path)
            self._stop = StopRequested(number, path)

    def _agreed_signal(self, trainer: Trainer) -> int:
        """The same on all ranks; 0 where none has received one."""
        received: Any = torch.tensor(self._received or 0, device=trainer.strategy.root_device)
        return int(trainer.strategy.reduce(received, reduce_op="max"))

    def _leave(self) -> None:
        # Not in on_train_batch_end: the step's metrics are logged after that hook.
        if self._stop is not None:
            raise self._stop

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop before validation."""
        self._leave()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop at the end of the epoch."""
        self._leave()

    @staticmethod
    def _default_path(trainer: Trainer) -> Path:
        folder = getattr(trainer.checkpoint_callback, "dirpath", None)
        return Path(folder or trainer.default_root_dir) / "last.ckpt"

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """From here on the run finishes."""
        self._is_finishing = True
        if self._received is not None:
            self._say(f"{signal.Signals(self._received).name} came after the last step: {self._plan()}")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Give the signals back."""
        self._restore()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Give the signals back."""
        self._restore()


def _nothing() -> None:
    """Stands in for Lightning's registration of signal handlers."""


def _requeue_signal(trainer: Trainer) -> int | None:
    """The signal at which Lightning saves and requeues a SLURM job; None elsewhere."""
    environment: Any = getattr(trainer.strategy, "cluster_environment", None)
    is_requeued = isinstance(environment, SLURMEnvironment) and environment.auto_requeue
    return environment.requeue_signal if is_requeued and trainer.state.fn == TrainerFn.FITTING else None
