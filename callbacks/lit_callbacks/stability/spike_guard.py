"""Detection of loss and gradient spikes, and skipping of their optimizer steps before the weights change."""

import json
import math
import re
import statistics
from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lit_callbacks.batch_ids import PerSample, batch_ids
from lit_callbacks.distributed.all_reduce import all_reduce
from lit_callbacks.distributed.gradient_norms import norms_by_name, parameters_of, squared_norm
from lit_callbacks.either_package import is_a
from lit_callbacks.internals import torch_internals
from lit_callbacks.internals.lightning_internals import attributes_of
from lit_callbacks.output.attempts import Attempts, written
from lit_callbacks.output.log_figures import log_figures
from lit_callbacks.protocols import MeasuresGradientNorm, SumsGradientNorm, grad_scaler
from lit_callbacks.run_folder import run_folder
from lit_callbacks.stability.running_statistics import RunningStatistics

LEAST_DEVIATION = 0.1
"""Smallest deviation, relative to the median, for runs with almost no noise."""
_EVIDENCE = re.compile(r"step\d{8,}\.rank(\d+)\.json")


class SpikesPersist(RuntimeError):
    """Exception that ``trainer.fit`` raises, on all ranks together, when too many steps were skipped."""


def excess(value: float, history: Sequence[float]) -> float:
    """Number of robust standard deviations by which ``value`` exceeds the median of ``history``.

    Computed on logarithms if all values are positive: gradient norms, and losses of a nearly learned task, range over
    powers of ten, and good steps of twenty times the median are common. The deviation is 1.4826 x the median absolute
    deviation, which estimates the standard deviation of a normal distribution and is robust to spikes; it is at least
    ``LEAST_DEVIATION`` of the median, so that in a run with little noise not every step counts as a spike.
    """
    if value > 0 and min(history) > 0:
        value, history, least = math.log(value), [math.log(past) for past in history], LEAST_DEVIATION
    else:
        least = max(LEAST_DEVIATION * abs(statistics.median(history)), 1e-12)
    median = statistics.median(history)
    spread = 1.4826 * statistics.median(abs(past - median) for past in history)
    return (value - median) / max(spread, least)


def may_exceed(value: float, ordered: Sequence[float], threshold: float) -> bool:
    """Whether ``excess`` can be above ``threshold``, given that a deviation is at least ``LEAST_DEVIATION``.

    It nearly always cannot, and this check takes almost no time.

    Args:
        value: value to check, as for ``excess``.
        ordered: history in ascending order.
        threshold: threshold that ``excess`` is compared with, in robust standard deviations.
    """
    if value <= 0 or ordered[0] <= 0:
        return True
    median_low = ordered[(len(ordered) - 1) // 2]
    return math.log(value / median_low) > threshold * LEAST_DEVIATION


class History:
    """Last values of a quantity, in order of time and in ascending order."""

    def __init__(self, window: int, values: Iterable[float] = ()) -> None:
        """Start with given values.

        Args:
            window: number of values to keep.
            values: initial values, the oldest first.
        """
        self.values = deque(values, maxlen=window)
        self.ordered = sorted(self.values)

    def append(self, value: float) -> None:
        """Add the newest value; remove the oldest if there are more than ``window``."""
        if len(self.values) == self.values.maxlen:
            del self.ordered[bisect_left(self.ordered, self.values[0])]
        self.values.append(value)
        insort(self.ordered, value)


class SpikeGuard(Callback):
    """Skip optimizer steps with a NaN, infinite or spiking loss or gradient norm, on all ranks together.

    The check runs after the backward pass of a step's last micro-batch, before gradient clipping and the optimizer. In
    a skipped step the gradients are removed, so weights, momentum and weight decay do not change, and running
    statistics of batch norms are put back; other buffers that a forward pass changes are not. Learning-rate schedules
    and ``global_step`` advance. Logged: ``spike_guard/skipped_steps``, the number of skipped steps so far,
    whenever it has changed.

    It costs one all-reduce of four numbers and one synchronization with the device per optimizer step, none per
    micro-batch: the host decides before the optimizer runs. One step later, without waiting, would be too late: a NaN
    or a spike would be in the weights, and in checkpoints that are written meanwhile.

    A module that computes its gradient norm itself can provide a method ``measured_gradient_norm(optimizer)``, so that
    it is computed once: it returns the norm over all ranks, a scalar, or None if it has none. Under fp16 with a
    gradient scaler, infinite gradients are left to the scaler, which expects them.
    """

    def __init__(
        self,
        threshold: float = 6.0,
        window: int = 100,
        warmup_steps: int = 20,
        stop_after: int = 10,
        folder: str | Path | None = None,
        ids: Callable[[Any], Any] = batch_ids,
    ) -> None:
        """Set the definition of a spike and the limits.

        Args:
            threshold: number of robust standard deviations above the median of the last good steps at which a spike
                begins (see ``excess``).
            window: number of last good optimizer steps whose median is taken.
            warmup_steps: number of good steps before a finite value can count as a spike.
            stop_after: number of skipped steps among the last ``window`` steps at which ``SpikesPersist`` is raised.
            folder: folder for the evidence, a JSON file for each skipped step and rank; None is ``spikes`` in
                ``trainer.default_root_dir``. A run that begins at step 0 removes that of an earlier one.
            ids: function from a batch to the ids of its samples, for the evidence.

        Raises:
            ValueError: a number is out of range.
        """
        if not threshold > 0 or not 1 <= stop_after <= window or not 2 <= warmup_steps <= window:
            raise ValueError(
                f"SpikeGuard(threshold={threshold}, window={window}, warmup_steps={warmup_steps}, "
                f"stop_after={stop_after}): threshold must be positive, 1 <= stop_after <= window and "
                "2 <= warmup_steps <= window"
            )
        self.threshold, self.window, self.warmup_steps, self.stop_after = threshold, window, warmup_steps, stop_after
        self.folder = None if folder is None else Path(folder)
        self.ids = ids
        self._attempts = Attempts("SpikeGuard")
        self._statistics: RunningStatistics | None = None
        self._reset()

    def _reset(self) -> None:
        self.skipped_steps = 0
        """Number of steps with a spike, in this run and the runs that it resumes."""
        self._recent: deque[bool] = deque(maxlen=self.window)
        self._history: defaultdict[str, History] = defaultdict(partial(History, self.window))
        self._logged = 0
        self._begin_step()

    def _begin_step(self) -> None:
        self._loss: Tensor | None = None
        self._batches: list[tuple[int, PerSample | None]] = []
        self._has_stepped = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget an earlier run, of another trainer; a resumed run restores its state after this hook."""
        if stage == "fit" and trainer.global_step == 0:
            self._reset()

    # --- data of a step ------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Discard the micro-batches of a step that an earlier fit did not finish, and the evidence of another run."""
        self._begin_step()
        self._attempts = Attempts("SpikeGuard")  # each fit has warnings of its own
        self._statistics = RunningStatistics(pl_module)
        if trainer.global_step == 0 and not attributes_of(trainer).fast_dev_run:
            folder = self._folder(trainer)
            what = f"SpikeGuard cannot remove the evidence of an earlier run in {str(folder)!r}; give folder="
            written(what, lambda: _forget(folder, trainer.global_rank, trainer.world_size))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        """Store the ids of the step's samples."""
        if self._has_stepped:
            self._batches, self._has_stepped = [], False
        ids = self._attempts.result("cannot tell samples apart; look at ids=", lambda: self.ids(batch))
        self._batches.append((batch_idx, ids))

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Add up the step's loss: Lightning has divided each micro-batch's loss by the number of micro-batches."""
        loss = loss.detach()
        if loss.ndim > 0:  # manual optimization may pass a vector, and the gradient of each element
            loss = loss.sum()
        self._loss = loss if self._loss is None else self._loss + loss

    # --- the decision --------------------------------------------------------------------------------

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Check the step's loss and gradient norm, and remove the gradients if one of them is a spike.

        Raises:
            SpikesPersist: ``stop_after`` of the last steps were skipped.
        """
        loss, norm = self._measure(trainer, pl_module, optimizer)
        self._loss, self._has_stepped = None, True
        which = f"optimizer {trainer.optimizers.index(optimizer)} " if len(trainer.optimizers) > 1 else ""
        measured = {f"{which}loss": loss, f"{which}gradient norm": norm}
        reasons = [why for name, value in measured.items() if (why := self._wrong(trainer, name, value)) is not None]
        self._recent.append(bool(reasons))
        if reasons:
            self._skip(trainer, pl_module, optimizer, reasons, {"loss": loss, "gradient_norm": norm})
        else:
            for name, value in measured.items():
                if value is not None and math.isfinite(value):
                    self._history[name].append(value)
            if self._statistics is not None:
                self._statistics.keep()
        if self.skipped_steps != self._logged:
            log_figures(trainer, {"spike_guard/skipped_steps": float(self.skipped_steps)})
            self._logged = self.skipped_steps

    def _measure(
        self, trainer: Trainer, module: LightningModule, optimizer: Optimizer
    ) -> tuple[float | None, float | None]:
        """Mean loss over the ranks and the norm of all gradients; None for a missing one."""
        scaler = grad_scaler(trainer)
        scale = 1.0 if scaler is None else scaler.get_scale()
        has_norm, norm = _norm(trainer, module, optimizer)
        alone = trainer.world_size == 1
        dtype = torch.promote_types(torch.float32, self._loss.dtype) if alone and self._loss is not None else None
        # Filled there and read once: torch.tensor would copy to the device, and each copy and each read waits for it.
        local = torch.zeros(4, dtype=dtype or torch.float32, device=trainer.strategy.root_device)
        for index, value in enumerate((self._loss is not None, has_norm, self._loss, norm)):
            if value is not None:
                local[index] = value
        if alone:
            has_loss, norms, total, length = local.tolist()
            return total / scale if has_loss else None, length if norms else None
        local[3] **= 2
        # One collective, so that all ranks see the same numbers and decide alike.
        has_loss, norms, total, summed = all_reduce(trainer, local, "sum").tolist()
        return total / has_loss / scale if has_loss else None, math.sqrt(summed) if norms else None

    def _wrong(self, trainer: Trainer, name: str, value: float | None) -> str | None:
        if value is None:
            return None
        if not math.isfinite(value):
            has_scaler = grad_scaler(trainer) is not None
            return None if has_scaler and name.endswith("norm") else f"{name} is {value}"
        ordered = self._history[name].ordered
        if len(ordered) < self.warmup_steps or not may_exceed(value, ordered, self.threshold):
            return None
        if (above := excess(value, ordered)) > self.threshold:
            median = statistics.median(ordered)
            return f"{name} is {value:.4g}, {above:.1f} deviations above its median {median:.4g}"
        return None

    def _skip(
        self,
        trainer: Trainer,
        module: LightningModule,
        optimizer: Optimizer,
        reasons: list[str],
        measured: dict[str, float | None],
    ) -> None:
        self.skipped_steps += 1
        evidence = self._save(trainer, module, optimizer, reasons, measured)
        what = f"step {trainer.global_step}: {'; '.join(reasons)}"
        if (why_not := _why_unskippable(trainer, optimizer)) is not None:
            rank_zero_warn(f"{what}. The step is taken all the same: {why_not}; evidence: {evidence}")
        else:
            for parameter in parameters_of(optimizer):
                parameter.grad = None  # with zeros, weight decay and momentum would still change the weights
            if self._statistics is not None:
                self._statistics.restore()
            rank_zero_warn(f"{what}; the step is skipped, evidence: {evidence}")
        if sum(self._recent) >= self.stop_after:
            raise SpikesPersist(
                f"{sum(self._recent)} of the last {len(self._recent)} steps were wrong (stop_after={self.stop_after}), "
                f"the last one: {what}; look at {evidence.parent}, then resume from an earlier checkpoint without "
                "those samples, or start again with a lower learning rate"
            )

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Let the module go."""
        self._statistics = None

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Warn if no step could be checked."""
        self._statistics = None
        if self._batches and not self._recent:
            self._attempts.warn(
                f"checked nothing: Lightning took no optimizer step (batches: {len(self._batches):,}); in manual "
                "optimization, take the steps with the optimizers that self.optimizers() returns"
            )

    # --- evidence ------------------------------------------------------------------------------------

    def _save(
        self,
        trainer: Trainer,
        module: LightningModule,
        optimizer: Optimizer,
        reasons: list[str],
        measured: Mapping[str, float | None],
    ) -> Path:
        folder = self._folder(trainer)
        path = folder / f"step{trainer.global_step:08d}.rank{trainer.global_rank}.json"
        evidence = {
            "step": trainer.global_step,
            "epoch": trainer.current_epoch,
            "reasons": reasons,
            **measured,
            "learning_rates": [group.get("lr") for group in optimizer.param_groups],
            "batches": [{"batch_idx": index, "ids": ids} for index, ids in self._batches],
            "gradient_norms": norms_by_name(trainer, module, optimizer),  # a collective
        }
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(_json_safe(evidence), indent=1, allow_nan=False) + "\n", encoding="utf-8")
        except OSError as error:
            rank_zero_warn(f"SpikeGuard cannot write its evidence to {str(folder)!r} ({error.strerror}); give folder=")
        return path

    def _folder(self, trainer: Trainer) -> Path:
        return self.folder or run_folder(trainer) / "spikes"

    # --- resuming ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """History and counts, for a resumed run."""
        history = {name: list(history.values) for name, history in self._history.items()}
        return {"skipped_steps": self.skipped_steps, "recent": list(self._recent), "history": history}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the history and counts, in place of those of an earlier fit."""
        self._reset()
        self.skipped_steps = state_dict["skipped_steps"]
        self._recent.extend(state_dict["recent"])
        self._history.update({name: History(self.window, values) for name, values in state_dict["history"].items()})


def _norm(trainer: Trainer, module: LightningModule, optimizer: Optimizer) -> tuple[bool, Tensor | float]:
    """Whether this rank has gradients, and its part of their norm: the squared parts sum up to the squared norm."""
    parameters, strategy = [p for p in parameters_of(optimizer) if p.grad is not None], trainer.strategy
    if isinstance(module, MeasuresGradientNorm):
        if (norm := module.measured_gradient_norm(optimizer)) is not None:
            return True, norm if trainer.world_size == 1 else norm / trainer.world_size**0.5
    elif isinstance(strategy, SumsGradientNorm) and (norm := strategy.gradient_norm(parameters)) is not None:
        return bool(parameters), norm / trainer.world_size**0.5
    return bool(parameters), squared_norm(parameters, trainer).sqrt() if parameters else 0.0


def _forget(folder: Path, rank: int, world_size: int) -> None:
    """Remove the evidence of a rank, on rank 0 also that of ranks that this run does not have."""
    for path in folder.glob("step*.rank*.json"):
        if (match := _EVIDENCE.fullmatch(path.name)) is not None:
            owner = int(match.group(1))
            if (owner if owner < world_size else 0) == rank:
                path.unlink()


def _why_unskippable(trainer: Trainer, optimizer: Optimizer) -> str | None:
    if is_a(trainer.strategy, DeepSpeedStrategy):
        return "DeepSpeed keeps gradients to itself, so SpikeGuard sees the loss only and can only warn and stop"
    if grad_scaler(trainer) is not None and torch_internals.unscales_gradients_itself(optimizer):
        return "a fused optimizer under precision 16-mixed unscales gradients itself; set fused=False or bf16-mixed"
    return None


def _json_safe(value: object) -> object:
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _json_safe(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_safe(one) for one in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return value if isinstance(value, (int, str, type(None))) else str(value)
