"""Throughput of training and the time of each part of a step, without validation and checkpoints."""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lightning.pytorch.utilities.types import STEP_OUTPUT

from lit_callbacks.internals.lightning_internals import attributes_of, logged_step
from lit_callbacks.output.attempts import Attempts
from lit_callbacks.output.log_figures import log_figures
from lit_callbacks.output.quantities import as_count, as_number
from lit_callbacks.phases import Phase, unwatch, watch
from lit_callbacks.protocols import KnowsFullModelFlops
from lit_callbacks.throughput.batch_counts import BatchCounts, Number, count_batch
from lit_callbacks.throughput.clocks import Interval, PhaseTimer, timer_of
from lit_callbacks.throughput.flops import TransformerFlops
from lit_callbacks.throughput.peak_flops import compute_dtype, measured_peak, peak_of
from lit_callbacks.widest_float import widest_float

Count = Callable[[Any], BatchCounts | int | None]
_Result = TypeVar("_Result")
PARTS: dict[str, tuple[Phase, ...]] = {
    "data": ("data",),
    "generation": ("generation",),
    "forward_backward": ("forward", "backward"),
    "optimizer": ("optimizer",),
    "callbacks": ("callbacks",),
    "other": ("other",),
}
"""Phases of each part of a step; validation and checkpoints are not part of a step."""
_OF_SOME = ("generation",)
"""Parts that the steps of most modules do not have; they are logged where they take time."""

_RATES = {
    "samples": "samples_per_second",
    "total_tokens": "total_tokens_per_second",
    "non_padding_tokens": "non_padding_tokens_per_second",
    "supervised_tokens": "supervised_tokens_per_second",
    "flops": "model_flops_per_second",
}
_COUNTS = [name for name in _RATES if name != "flops"]
_Counted = tuple[BatchCounts, float | None]
"""Counts of a batch, and its FLOPs if there is a function for them."""


@dataclass
class Measured:
    """Counts and seconds of one or more optimizer steps on this rank."""

    steps: int = 0
    done: dict[str, Number] = field(default_factory=dict)
    """Sums of counts by the names of ``_RATES``; a name is missing if a batch could not be counted."""
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    """Seconds by the names of ``PARTS``."""

    @classmethod
    def of(cls, parts: Iterable["Measured"]) -> "Measured":
        """Sum of several measurements."""
        parts = list(parts)
        names = set.intersection(*(set(part.done) for part in parts)) if parts else set()
        return cls(
            sum(part.steps for part in parts),
            {name: sum(part.done[name] for part in parts) for name in _RATES if name in names},
            {name: sum(part.seconds[name] for part in parts) for name in PARTS},
        )

    @property
    def total_seconds(self) -> float:
        """Seconds of all parts."""
        return sum(self.seconds.values())


class ThroughputMonitor(Callback):
    """Log the throughput and the time of each part of a step, over the last steps; at the end, over the full run.

    Logged under ``throughput/``, summed over all devices, and in a run of several devices also under
    ``throughput/device/``, the mean per device: ``samples_per_second``, ``total_tokens_per_second`` (padding included),
    ``non_padding_tokens_per_second``, ``supervised_tokens_per_second`` (tokens with a label) and
    ``model_flops_per_second``. In addition: ``tokens_per_second``, which is ``non_padding_tokens_per_second``;
    ``data_wait``, the share of the time, 0 to 1, spent waiting for data; ``step_seconds`` and its parts
    ``step_seconds/data``, ``/forward_backward``, ``/optimizer``, ``/callbacks`` and ``/other`` (copy to the device,
    logging), and where a module generates what it trains on, ``/generation``; and ``mfu``, model FLOP/s divided by the
    device's peak FLOP/s, 0 to 1.

    The time is that of optimizer steps, data included; validation, checkpoints, models that ``AdapterMerger`` writes
    and the first steps (allocation, compilation) are left out. On CUDA it is measured on the device, by events that are
    read once the device has reached them, without a synchronization, so the last steps may be missing from a log. On
    other devices it is measured on the host.

    After training, ``summary`` holds the figures of the run; they are logged as ``throughput/run/...`` too. Lightning's
    ``Throughput`` takes one count of items, equal on all ranks and never zero, so it is not used.
    """

    def __init__(
        self,
        window: int = 20,
        count: Count = count_batch,
        flops: Callable[[Any], float | None] | None = None,
        peak: float | Literal["datasheet", "measure"] = "datasheet",
        skip_steps: int = 1,
    ) -> None:
        """Set the window, the counts and the peak.

        Args:
            window: number of last optimizer steps over which rates are averaged.
            count: function from a batch to its ``BatchCounts``, or to its number of non-padding tokens, or to None if
                unknown.
            flops: function from a batch to the model FLOPs of its forward and backward pass on this rank; None takes a
                formula for transformers with a Hugging Face style config (``lit_callbacks.flops``).
            peak: peak FLOP/s of one device, for MFU: a number; ``datasheet``, looked up by device name and dtype; or
                ``measure``, measured with matrix products when training starts, on any device.
            skip_steps: number of optimizer steps at the start that are not measured.

        Raises:
            ValueError: ``peak`` is another text, or a number is out of range.
        """
        if window < 1 or skip_steps < 0:
            raise ValueError(
                f"ThroughputMonitor(window={window}, skip_steps={skip_steps}): window must be 1 or more, skip_steps "
                "0 or more"
            )
        if isinstance(peak, str) and peak not in ("datasheet", "measure"):
            raise ValueError(f"ThroughputMonitor(peak={peak!r}): give 'datasheet', 'measure', or a number of FLOP/s")
        if not isinstance(peak, str) and not peak > 0:
            raise ValueError(f"ThroughputMonitor(peak={peak}): the device's FLOP/s must be positive, e.g. 9.9e14")
        self.window, self.count, self.flops, self.peak, self.skip_steps = window, count, flops, peak, skip_steps
        self.summary: dict[str, float] = {}
        """Figures of the full run after training, by the logged names."""
        self._attempts = Attempts("ThroughputMonitor")
        self._is_announced = False
        self._timer: PhaseTimer[Any] | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start to measure, and discard the figures of an earlier fit."""
        self._end(trainer)
        self.summary = {}
        self._attempts = Attempts("ThroughputMonitor")  # each fit has warnings of its own
        self._steps: deque[Measured] = deque(maxlen=self.window)
        self._run: Measured = Measured()
        self._batches: list[_Counted] = []
        self._pending: deque[tuple[list[_Counted], list[Interval[Any]]]] = deque()
        self._skipped, self._global_step, self._number = 0, trainer.global_step, logged_step(trainer)
        # A strategy that keeps only some layers on each rank has stored the formula of the full model.
        of_full_model = pl_module.full_model_flops if isinstance(pl_module, KnowsFullModelFlops) else None
        formula = partial(TransformerFlops.of, pl_module)
        self._flops_of_model = (
            None if self.flops else of_full_model or self._attempts.result("no formula for FLOPs", formula)
        )
        if not self.flops and self._flops_of_model is None:
            self._attempts.warn(
                f"no FLOP/s and no MFU: {type(pl_module).__name__} does not hold exactly one transformer config, of a "
                "decoder or an encoder alone; pass flops="
            )
        self._peak = self._find_peak(trainer, pl_module)
        self._timer = timer_of(trainer.strategy.root_device)
        watch(trainer, self._timer.switch)

    def _find_peak(self, trainer: Trainer, pl_module: LightningModule) -> float | None:
        if isinstance(self.peak, int | float):
            return float(self.peak)
        device, dtype = trainer.strategy.root_device, compute_dtype(trainer, pl_module)
        if self.peak == "measure":
            return measured_peak(device, dtype)
        peak = peak_of(device, dtype)
        if peak is None and device.type != "cpu" and (self.flops or self._flops_of_model):
            name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
            self._attempts.warn(f"no MFU: no datasheet is kept for {dtype} on {name!r}; pass peak='measure' or FLOP/s")
        return peak

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: object, batch_idx: int
    ) -> None:
        """Count the batch; at the end of an optimizer step, store its times."""
        if self._timer is None:
            return
        self._add(batch)
        step = trainer.global_step
        if step == self._global_step:
            return
        every, before = attributes_of(trainer).log_every_n_steps, self._number
        self._global_step, self._number = step, logged_step(trainer) + 1
        intervals, batches, self._batches = self._timer.take_intervals(), self._batches, []
        if self._skipped < self.skip_steps:
            self._skipped += 1
            return
        self._pending.append((batches, intervals))
        self._collect()  # in each step, so that the events of a run that logs rarely or never do not add up
        if every and self._number // every != before // every:
            self._log(trainer)

    def _add(self, batch: object) -> None:
        counts = self._attempts.result("cannot count a batch", partial(self.count, batch))
        if not isinstance(counts, BatchCounts):
            own = self._attempts.result("cannot count a batch", partial(count_batch, batch)) or BatchCounts()
            counts = BatchCounts(samples=own.samples, non_padding_tokens=counts)
        if counts.non_padding_tokens is None:
            why = (
                "without 'input_ids'" if counts.total_tokens is None else "whose 'attention_mask' is not one of tokens"
            )
            self._attempts.warn(
                f"cannot count the tokens of a {type(batch).__name__} {why}, so no tokens per second are logged; "
                "pass count=<function from batch to int>"
            )
        flops = None if self.flops is None else self._attempts.result("cannot count FLOPs", partial(self.flops, batch))
        self._batches.append((counts, flops))

    def _sums(self, batches: list["_Counted"]) -> dict[str, Number]:
        """Sums over batches by the names of ``_RATES``, without those that are unknown for a batch."""
        formula = self._flops_of_model
        by_name: dict[str, list[Number | None]] = {
            name: [getattr(counts, name) for counts, _ in batches] for name in _COUNTS
        }
        by_name["flops"] = [flops if formula is None else formula(counts) for counts, flops in batches]
        known = {name: [number for number in numbers if number is not None] for name, numbers in by_name.items()}
        return {name: sum(numbers) for name, numbers in known.items() if len(numbers) == len(batches)}

    def _collect(self) -> None:
        """Add the steps that the device has finished."""
        while self._timer is not None and self._pending:
            batches, intervals = self._pending[0]
            if (seconds := self._timer.seconds(intervals)) is None:
                return
            self._pending.popleft()
            parts = {name: sum(seconds.get(phase, 0.0) for phase in phases) for name, phases in PARTS.items()}
            step = Measured(1, self._sums(batches), parts)
            self._steps.append(step)
            self._run = step if not self._run.steps else Measured.of((self._run, step))

    def _log(self, trainer: Trainer) -> None:
        if not self._is_announced:
            self._is_announced = True
            rank_zero_info(
                f"throughput is measured from optimizer step {self.skip_steps + 1} of this fit on, without validation "
                "and checkpoints"
            )
        figures = self._figures(trainer, Measured.of(self._steps))
        log_figures(trainer, {f"throughput/{name}": value for name, value in figures.items()})
        if (tokens := figures.get("tokens_per_second")) is not None:
            trainer.progress_bar_metrics["throughput/tokens_per_second"] = tokens

    def _figures(self, trainer: Trainer, measured: Measured) -> dict[str, float]:
        """Rates over all ranks, and times averaged over the ranks; a collective with equal results on every rank."""
        device, ranks = trainer.strategy.root_device, trainer.world_size
        # All ranks of a data-parallel replica see the same data, which counts once.
        replicas = (trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1)
        unknown = float("nan")
        means = [float(measured.done.get(name, unknown)) / (measured.total_seconds or unknown) for name in _RATES]
        means += [measured.seconds[name] / max(measured.steps, 1) for name in PARTS]
        if ranks > 1:
            vector = torch.tensor(means, dtype=widest_float(device), device=device)
            means = torch.as_tensor(trainer.strategy.reduce(vector, reduce_op="mean")).tolist()
        if not measured.steps:
            return {}
        figures: dict[str, float] = {}
        for name, mean in zip(_RATES, means, strict=False):
            if name in measured.done:
                rate = mean * replicas
                figures |= {_RATES[name]: rate} | ({f"device/{_RATES[name]}": rate / ranks} if ranks > 1 else {})
        parts = means[len(_RATES) :]
        figures |= {"step_seconds": sum(parts), "data_wait": parts[0] / sum(parts)}
        taken = {name: value for name, value in zip(PARTS, parts, strict=True) if value or name not in _OF_SOME}
        figures |= {f"step_seconds/{name}": value for name, value in taken.items()}
        if "non_padding_tokens" in measured.done:
            figures["tokens_per_second"] = figures["non_padding_tokens_per_second"]
        if "flops" in measured.done and self._peak:
            figures["mfu"] = figures["model_flops_per_second"] / ranks / self._peak
        return figures

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compute the figures of the run, after a synchronization with the device."""
        if self._timer is None:
            return
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.synchronize(trainer.strategy.root_device)
        self._collect()
        self.summary = self._figures(trainer, self._run)
        self._end(trainer)
        if not self.summary:
            self._say_why_none()
            return
        for logger in trainer.loggers:
            logger.log_metrics({f"throughput/run/{k}": v for k, v in self.summary.items()}, step=trainer.global_step)
        rank_zero_info(describe(self.summary, self._run.steps, trainer.world_size))

    def _say_why_none(self) -> None:
        if self._skipped:
            why = f"the run took {as_count(self._skipped, 'step')}, and the first skip_steps={self.skip_steps} are "
            self._attempts.warn(f"no figures: {why}not measured; train longer or lower it", "short")
        elif self._batches:
            self._attempts.warn(
                f"no figures: Lightning counted no optimizer step (batches: {len(self._batches):,}); in manual "
                "optimization, take the steps with the optimizers that self.optimizers() returns",
                "uncounted",
            )

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Restore the trainer's profiler."""
        self._end(trainer)

    def _end(self, trainer: Trainer) -> None:
        if self._timer is not None:
            unwatch(trainer, self._timer.switch)
            self._timer = None


def describe(summary: dict[str, float], steps: int, ranks: int) -> str:
    """Text of a run's figures, in two lines.

    Args:
        summary: figures of the run, as in ``ThroughputMonitor.summary``.
        steps: number of measured optimizer steps.
        ranks: number of devices.
    """
    rates = [("samples", "samples/s"), ("total_tokens", "tokens/s with padding"), ("non_padding_tokens", "without")]
    rates += [("supervised_tokens", "supervised")]
    texts = [f"{as_number(summary[key])} {unit}" for name, unit in rates if (key := _RATES[name]) in summary]
    if "model_flops_per_second" in summary:
        mfu = f", MFU {summary['mfu']:.1%}" if "mfu" in summary else ""
        texts.append(f"{summary['model_flops_per_second'] / ranks / 1e12:,.3g} model TFLOP/s per device{mfu}")
    total = summary["step_seconds"]
    taken = {name: summary[key] / total for name in PARTS if (key := f"step_seconds/{name}") in summary}
    parts = ", ".join(f"{name.replace('_', '+')} {share:.1%}" for name, share in taken.items())
    measured = f"{as_count(steps, 'step')} on {as_count(ranks, 'device')}"
    rated = ", ".join(texts) or "unknown, as batches hold no tensors; pass count=<function from batch to BatchCounts>"
    return f"throughput of {measured}: {rated}\na step takes {as_number(total)} s: {parts}"
