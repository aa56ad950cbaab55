"""Graceful stop on Ctrl-C or SIGTERM: finish the optimizer step and save a checkpoint first."""

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
from lightning.pytorch.utilities.types import STEP_OUTPUT

from lit_callbacks.distributed.all_reduce import all_reduce
from lit_callbacks.distributed.host_copy import HostCopy
from lit_callbacks.either_package import is_a
from lit_callbacks.internals import lightning_internals
from lit_callbacks.internals.lightning_internals import attributes_of
from lit_callbacks.protocols import WritesToFolder
from lit_callbacks.run_folder import is_url

SAME_SIGNAL_SECONDS = 1.0
"""Seconds within which a repeated signal counts as the same one: launchers and schedulers may send it twice."""


class StopRequested(Exception):
    """Exception that ``trainer.fit`` raises once the checkpoint is saved."""

    def __init__(self, signal_number: int, checkpoint: str) -> None:
        """Store the signal and the checkpoint for the command line.

        Args:
            signal_number: number of the signal that requested the stop.
            checkpoint: path of the checkpoint, for ``fit(ckpt_path=...)``.
        """
        super().__init__(f"stopped by {signal.Signals(signal_number).name}; saved {checkpoint}")
        self.signal_number = signal_number
        self.checkpoint = checkpoint

    @property
    def exit_code(self) -> int:
        """128 + signal number, the convention of shells: 130 for Ctrl-C, 143 for SIGTERM."""
        return 128 + self.signal_number


class StoppedAtOnce(SystemExit):
    """Exception in the main thread on a second signal, or on the first if there is nothing to save."""

    def __init__(self, signal_number: int, reason: str) -> None:
        """Set the exit code, 128 + signal number.

        Args:
            signal_number: number of the signal.
            reason: reason why nothing is saved.
        """
        super().__init__(128 + signal_number)
        self.exit_code = 128 + signal_number
        self.reason = f"stopped at once by {signal.Signals(signal_number).name} ({reason})"


class GracefulStop(Callback):
    """On SIGINT (Ctrl-C) or SIGTERM, finish the optimizer step, save a checkpoint, then stop.

    A signal only sets a flag. At the end of each optimizer step, and only there, the ranks agree whether any of them
    got a signal: no collective runs in a signal handler, and no partly accumulated gradient is lost, so that a resumed
    run equals an uninterrupted one if its data loader can be resumed (Lightning starts any other one from its first
    sample; and it leaves out the validation after a stop in the last step before it). On CUDA with several ranks they
    agree one step later, so that no step waits for the answer. A running validation of ``fit`` is finished first.
    Before the first step, and in ``validate``, ``test`` and ``predict``, there is nothing to save: the process ends at
    once. After the last step, the run finishes its final writes. A second signal always ends the process at once.

    It saves what the callbacks before it in the list have done in that step: put ``EMAWeightAveraging`` before it.

    From ``setup`` to ``teardown``, Lightning's own SIGTERM handler, which broadcasts, is disabled; Lightning handles
    SLURM's requeue signal at the end of an optimizer step, and the run goes on until SLURM ends it.
    """

    def __init__(self, checkpoint: str | Path | None = None) -> None:
        """Set the checkpoint's path.

        Args:
            checkpoint: path of the checkpoint to write; None is ``last.ckpt`` in the folder of the checkpoint callback,
                or in ``trainer.default_root_dir`` without one. For SLURM's requeue signal, None is the path from
                which Lightning resumes a requeued job by itself.
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
        self._step = self._first_step = 0
        self._agreed: HostCopy | None = None

    # --- signals -------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Install the signal handlers."""
        if self._previous:
            return
        self._reset()
        if threading.current_thread() is not threading.main_thread():
            rank_zero_warn("GracefulStop sees no signals: training runs outside the main thread")
            return
        if any(isinstance(one, GracefulStop) and one._previous for one in attributes_of(trainer).callbacks):
            rank_zero_warn("GracefulStop is among the callbacks more than once, and only the first sees signals")
            return
        self._trainer = trainer
        lightning_internals.disable_signal_handlers(trainer)
        for number in {signal.SIGINT, signal.SIGTERM, _requeue_signal(trainer) or signal.SIGTERM}:
            self._previous[number] = signal.signal(number, self._receive)

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if self._previous:
            lightning_internals.enable_signal_handlers(self._trainer)
            del self._trainer  # else a copy of the callback would be one of the trainer too
        self._previous = {}

    def _receive(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if os.getpid() != self._process:  # a forked worker process, which ends with its parent
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
        # Not print: the signal may have interrupted a print of the main thread.
        if self._trainer.is_global_zero:
            os.write(2, f"\n{text}\n".encode())

    # --- points to stop at ---------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Store the step at which training starts or resumes."""
        self._step = self._first_step = trainer.global_step

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        """Stop before the next batch, if the checkpoint is saved."""
        self._is_training = True
        self._leave()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: object, batch_idx: int
    ) -> None:
        """Save a checkpoint at the end of an optimizer step, if any rank got a signal."""
        if trainer.global_step == self._step:  # gradient accumulation is not complete
            return
        self._step = trainer.global_step
        self._save_if_asked(trainer)

    def _save_if_asked(self, trainer: Trainer) -> None:
        if (number := self._agreed_signal(trainer)) == _requeue_signal(trainer):
            self._received = None
            lightning_internals.save_and_requeue(trainer, number, self._path(trainer) if self.checkpoint else None)
        elif number:
            path = self._path(trainer)
            trainer.save_checkpoint(path)
            self._stop = StopRequested(number, path)

    def _path(self, trainer: Trainer) -> str:
        """Path of the checkpoint to write, which the checkpoint callback learns of."""
        path = str(self.checkpoint or self._default_path(trainer))
        if is_a(trainer.checkpoint_callback, ModelCheckpoint):
            # Else the resumed run writes last-v1.ckpt too; it spells paths so. The file may be a link.
            folder, name = os.path.split(path)
            here = path if is_url(path) else os.path.join(os.path.realpath(folder), name)
            trainer.checkpoint_callback.last_model_path = here
        return path

    def _agreed_signal(self, trainer: Trainer) -> int:
        """Signal number that all ranks agree on; 0 if none has received a signal.

        On CUDA it is that of the step before: the host reads it when the device has long computed it, and so waits for
        nothing.
        """
        if trainer.world_size == 1:
            return self._received or 0
        device = trainer.strategy.root_device
        received = torch.full((), self._received or 0, device=device)  # filled there: torch.tensor would copy, and wait
        agreed = HostCopy(all_reduce(trainer, received, "max"))
        before, self._agreed = self._agreed, agreed
        if device.type != "cuda":
            return int(agreed.value())
        return 0 if before is None else int(before.value())

    def _leave(self) -> None:
        # Not called in on_train_batch_end: the step's metrics are logged after that hook.
        if self._stop is not None:
            raise self._stop

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop before validation, if the checkpoint is saved."""
        self._leave()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop at the end of the epoch, if the checkpoint is saved.

        Save here where Lightning has counted no step of this fit: in manual optimization it sees those only that are
        taken with the optimizers that ``self.optimizers()`` returns.
        """
        if trainer.global_step == self._first_step and not pl_module.automatic_optimization:
            self._save_if_asked(trainer)
        self._leave()

    @staticmethod
    def _default_path(trainer: Trainer) -> str:
        callback = trainer.checkpoint_callback
        folder = callback.dirpath if isinstance(callback, WritesToFolder) else None
        return os.path.join(folder or trainer.default_root_dir, "last.ckpt")  # a Path would damage a URL

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note that the last step is done: a signal no longer stops the run."""
        self._is_finishing = True
        if self._received is not None:
            self._say(f"{signal.Signals(self._received).name} came after the last step: {self._plan()}")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Restore the previous signal handlers."""
        self._restore()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Restore the previous signal handlers."""
        self._restore()


def _requeue_signal(trainer: Trainer) -> int | None:
    """Signal on which Lightning saves and requeues a SLURM job; None outside of ``fit`` and of such jobs."""
    environment = lightning_internals.cluster_environment(trainer)
    if not is_a(environment, SLURMEnvironment) or not environment.auto_requeue:
        return None
    return environment.requeue_signal if trainer.state.fn == TrainerFn.FITTING else None
