"""Checks that end a run before NaN or infinite losses, gradient norms or weights are saved."""

from pathlib import Path
from typing import NamedTuple

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lit_callbacks import SpikeGuard
from lit_callbacks.distributed.host_copy import HostCopy
from lit_callbacks.internals.lightning_internals import attributes_of
from torch import Tensor, nn

from lit_ft.checkpointing.selection import newest_of
from lit_ft.errors import NotFinite
from lit_ft.model.files.finite_weights import not_finite


class _Watched(NamedTuple):
    step: int
    what: str
    value: HostCopy


class FiniteCheck:
    """Detection of values that are not finite, without making the host wait for a GPU.

    A value on a CPU is checked at once. A value on a GPU is copied to the host while the next step is queued, and is
    checked one step later, or before anything is saved: all ranks check at the same time.
    """

    def __init__(self) -> None:
        self._watched: list[_Watched] = []

    def watch(self, trainer: Trainer, what: str, value: Tensor) -> None:
        """Check a value of the current optimizer step.

        Args:
            trainer: trainer of the run; with a ``SpikeGuard``, which skips such steps or ends the run, nothing is
                checked.
            what: name of the value.
            value: scalar, the same on all ranks.

        Raises:
            NotFinite: this value, or an earlier one, is not finite.
        """
        if any(isinstance(callback, SpikeGuard) for callback in attributes_of(trainer).callbacks):
            return
        step = trainer.global_step + 1
        self._look(trainer, [one for one in self._watched if one.step < step])
        self._watched = [one for one in self._watched if one.step == step]
        watched = _Watched(step, what, HostCopy(value))
        if value.device.type == "cuda":
            self._watched.append(watched)
        else:
            self._look(trainer, [watched])

    def look_at_all(self, trainer: Trainer) -> None:
        """Wait for all pending values, and check them.

        Raises:
            NotFinite: a value is not finite.
        """
        watched, self._watched = self._watched, []
        self._look(trainer, watched)

    @staticmethod
    def _look(trainer: Trainer, watched: list[_Watched]) -> None:
        for step, what, copy in watched:
            if not torch.isfinite(value := copy.value()):
                raise NotFinite(f"step {step}: {what} is {float(value)}; {_advice(trainer)}")


def check_trained_weights(trainer: Trainer, module: nn.Module) -> None:
    """Refuse to save weights that are not finite; a collective, in which each rank checks its part of them.

    Raises:
        NotFinite: a weight is not finite, on any rank.
    """
    bad = next(not_finite({n: p for n, p in module.named_parameters() if p.requires_grad}), None)
    if not trainer.strategy.reduce_boolean_decision(bad is None, all=True):
        where = f"{bad} is" if bad is not None else "weights of another rank are"
        raise NotFinite(f"after step {trainer.global_step} {where} not finite: nothing is saved; {_advice(trainer)}")


def _advice(trainer: Trainer) -> str:
    newest = _newest_checkpoint(trainer)
    options = (
        "trainer.gradient_clip_val=1.0, model.dtype=bfloat16 in place of float16, or lit_callbacks.SpikeGuard, which "
        "skips such steps"
    )
    if newest is None:
        return f"no checkpoint is from before it: start again, with a lower learning rate, {options}"
    return f"{newest} is from before it: go on from there, with a lower learning rate, {options}"


def _newest_checkpoint(trainer: Trainer) -> Path | None:
    """Newest checkpoint of the run; all of them had finite weights when they were written."""
    callbacks = [one for one in trainer.checkpoint_callbacks if isinstance(one, ModelCheckpoint)]
    names = [name for one in callbacks for name in (one.last_model_path, one.best_model_path, *one.best_k_models)]
    names.append(str(trainer.ckpt_path or ""))
    return newest_of({Path(name) for name in names if name and Path(name).exists()})
