"""Memory profile by phase and purpose, and a report on an out-of-memory error."""

from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.optim import Optimizer

from lit_callbacks.distributed.gather import is_split
from lit_callbacks.internals import torch_internals
from lit_callbacks.internals.lightning_internals import attributes_of, logged_step
from lit_callbacks.memory import memory_readings
from lit_callbacks.memory.memory_advice import out_of_memory_page, size_text
from lit_callbacks.memory.memory_readings import in_mib
from lit_callbacks.memory.memory_timeline import Row, step_rows, write_csv, write_picture
from lit_callbacks.memory.storage_ledger import (
    Breakdown,
    Purpose,
    StorageLedger,
    local_bytes,
    tensors_in,
    vocabulary_of,
)
from lit_callbacks.output.attempts import Attempts
from lit_callbacks.output.log_figures import log_figures
from lit_callbacks.output.quantities import MIB
from lit_callbacks.peak_memory import host_peak
from lit_callbacks.phases import Phase, failed_in, unwatch, watch
from lit_callbacks.run_folder import run_folder

_RARE: tuple[Phase, ...] = ("validation", "checkpoint")
_BETWEEN: tuple[Phase, ...] = ("other", "data", "callbacks")
"""Phases for which no metrics are logged."""
_LEAK_READINGS = 12


class MemoryProfiler(Callback):
    """Log memory by phase, break down the memory of a few steps by purpose, and report on an out-of-memory error.

    Logged under ``memory/`` in MiB, of this rank, when the trainer logs: ``allocated``, ``reserved``,
    ``peak_allocated`` and ``peak_reserved`` since the last log (CUDA; MPS has the first two), ``host_rss`` (resident
    memory of the process without mapped files) and ``host_peak_rss``; and for each phase (``setup``, ``forward``,
    ``backward``, ``optimizer``, ``validation``, ``checkpoint``; where a module generates what it trains on,
    ``generation``) ``memory/<phase>/peak_allocated`` on CUDA and ``memory/<phase>/host_rss``, read at
    the end of the phase, in the logged steps.

    In ``sample_steps`` every tensor storage is tracked (``breakdown``, ``memory/breakdown/...``): parameters,
    gradients, optimizer state, activations and other, at the step's peak. The allocator's counters are read on the
    host, without a synchronization with the device.

    On an out-of-memory error, a page reports what memory was used for and which setting saves the most; then the error
    is raised on.
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        sample_steps: Sequence[int] = (1, 2),
        picture: bool = True,
        record_history: bool = False,
        leak_mib: float = 64,
    ) -> None:
        """Set the folder and the measurements.

        Args:
            dirpath: folder for ``memory_timeline.csv``, ``memory_step.csv``, the picture and the report; None is
                ``memory`` in the trainer's ``default_root_dir``.
            sample_steps: optimizer steps of this fit, counted from 1, in which every tensor storage is tracked, which
                makes them slower; compiled modules run without compilation in them. Step 1 starts without optimizer
                state, but makes the report of an error in that step complete.
            picture: whether to draw ``memory_timeline.png`` at the end, with matplotlib (the extra ``plots``).
            record_history: whether to record the origin of each allocation on CUDA, for ``snapshot``; it costs a little
                time.
            leak_mib: growth in MiB of the memory between steps, over the last 12 logged readings, above which a warning
                is given.

        Raises:
            ValueError: a step is below 1, or ``leak_mib`` is not positive.
        """
        if isinstance(sample_steps, int) or not all(step >= 1 for step in sample_steps) or not leak_mib > 0:
            raise ValueError(
                f"MemoryProfiler(sample_steps={sample_steps!r}, leak_mib={leak_mib}): sample_steps is a list of steps "
                "counted from 1, [] for none, and leak_mib positive, float('inf') for no warning"
            )
        self.dirpath = None if dirpath is None else Path(dirpath)
        self.sample_steps, self.picture = tuple(sample_steps), picture
        self.record_history, self.leak_mib = record_history, leak_mib
        self.breakdown: Breakdown | None = None
        """Memory breakdown of the last sampled step."""
        self.peaks: dict[str, dict[str, float]] = {}
        """Largest reading of this fit in MiB, by phase and name."""
        self.timeline: list[Row] = []
        """Rows of ``memory_timeline.csv``."""
        self._attempts = Attempts("MemoryProfiler")
        self._ledger: StorageLedger | None = None
        self._is_watching = False
        self._rows_of_step: list[Row] = []
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # until a run begins

    # --- phases ----------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Start to measure, with the phase ``setup``."""
        self._device = trainer.strategy.root_device
        if stage != "fit":
            return
        self.peaks, self.timeline, self.breakdown = {}, [], None
        self._attempts = Attempts("MemoryProfiler")  # each fit has warnings of its own
        self._steps, self._measures, self._phase = 0, False, "setup"
        self._overall = (0, 0)
        self._steady: deque[tuple[int, int]] = deque(maxlen=_LEAK_READINGS)
        self._rows_of_step = []
        self._folder = self.dirpath or run_folder(trainer) / "memory"
        memory_readings.take_peaks(self._device)
        if self.record_history and self._device.type == "cuda":
            torch_internals.record_memory_history()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the phase ``setup``, and follow the phases of training."""
        self._take("setup")
        self._phase, self._global_step = "other", trainer.global_step
        self._first_step = logged_step(trainer)
        self._measures = self._is_logged(trainer)
        watch(trainer, self._switch)
        self._is_watching = True

    def _switch(self, phase: Phase) -> None:
        if self._measures or self._phase in _RARE or phase in _RARE:
            self._take(self._phase)
        if self._ledger is not None:
            self._ledger.switch(phase)
        self._phase = phase

    def _take(self, phase: str) -> None:
        """Record the memory of the phase that ends."""
        if (peaks := memory_readings.take_peaks(self._device)) is not None:
            self._overall = max(self._overall[0], peaks[0]), max(self._overall[1], peaks[1])
        if phase in _BETWEEN:
            return
        figures = {"host_rss": memory_readings.host_memory(), "peak_allocated": peaks and peaks[0]}
        known = self.peaks.setdefault(phase, {})
        for name, value in in_mib(figures).items():
            known[name] = max(known.get(name, 0.0), value)

    def _is_logged(self, trainer: Trainer) -> bool:
        """Whether Lightning logs the next step; it counts one per step, for any number of optimizers."""
        every = attributes_of(trainer).log_every_n_steps
        return bool(every) and (self._first_step + self._steps + 1) % every == 0

    # --- steps -----------------------------------------------------------------------------------

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        """Start to track the tensor storages of a sampled step."""
        if self._ledger is None and self._steps + 1 in self.sample_steps:
            self._attempts.result(
                "cannot track the storages of a step", partial(self._open_ledger, trainer, pl_module, batch)
            )

    def _open_ledger(self, trainer: Trainer, pl_module: LightningModule, batch: object) -> None:
        ledger = StorageLedger(self._device, pl_module)
        ledger.know(pl_module.parameters(), "parameters")
        ledger.know(_gradients(pl_module), "gradients")
        ledger.know(_states(trainer), "optimizer_state")
        ledger.know([*pl_module.buffers(), *tensors_in(batch)], "other")
        memory_readings.take_peaks(self._device)
        self._overall_before, self._overall = self._overall, (0, 0)
        self._ledger = ledger.__enter__()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Mark the gradients, which are complete now."""
        if self._ledger is not None:
            self._ledger.know(_gradients(pl_module), "gradients")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: object, batch_idx: int
    ) -> None:
        """At the end of an optimizer step, compute the breakdown and log."""
        if trainer.global_step == self._global_step:
            return
        self._global_step, self._steps = trainer.global_step, self._steps + 1
        if self._ledger is not None:
            self._close_ledger(trainer, pl_module)
            self._log_breakdown(trainer)
        if self._measures:
            self._log(trainer)
        self._measures = self._is_logged(trainer)

    def _close_ledger(self, trainer: Trainer, pl_module: LightningModule) -> None:
        ledger, self._ledger = self._ledger, None
        assert ledger is not None
        ledger.__exit__(None, None, None)
        ledger.switch("other")
        ledger.know(_gradients(pl_module), "gradients")
        ledger.know(_states(trainer), "optimizer_state")
        peaks = memory_readings.take_peaks(self._device)
        measured = None if peaks is None else max(peaks[0], self._overall[0])
        self._overall = tuple(map(max, self._overall, self._overall_before, peaks or (0, 0)))  # type: ignore[assignment]
        self.breakdown = Breakdown.of(ledger, vocabulary_of(pl_module), measured)
        self._rows_of_step, self._sampled = step_rows(ledger), self._steps

    def _log_breakdown(self, trainer: Trainer) -> None:
        assert self.breakdown is not None
        figures = in_mib({f"memory/breakdown/{name}": size for name, size in self.breakdown.bytes.items()})
        for logger in trainer.loggers:
            logger.log_metrics(figures, step=trainer.global_step)

    def _log(self, trainer: Trainer) -> None:
        self._take(self._phase)
        device = self._device
        figures: dict[str, int | None] = {
            "allocated": memory_readings.allocated(device),
            "reserved": memory_readings.reserved(device),
            "host_rss": memory_readings.host_memory(),
            "host_peak_rss": host_peak(),
        }
        if device.type == "cuda":
            figures |= {"peak_allocated": self._overall[0], "peak_reserved": self._overall[1]}
            self._overall = (0, 0)
        by_phase = {f"{phase}/{name}": value for phase, known in self.peaks.items() for name, value in known.items()}
        row = in_mib(figures) | by_phase
        log_figures(trainer, {f"memory/{name}": value for name, value in row.items()})
        self.timeline.append({"step": trainer.global_step, **row})
        self._look_for_a_leak(figures["allocated"] or figures["host_rss"])

    def _look_for_a_leak(self, now: int | None) -> None:
        if now is None:
            return
        self._steady.append((self._steps, now))
        third = _LEAK_READINGS // 3
        if len(self._steady) < _LEAK_READINGS:
            return
        first, last = ([size for _, size in list(self._steady)[part]] for part in (slice(third), slice(-third, None)))
        grown, steps = min(last) - max(first), self._steady[-1][0] - self._steady[0][0]
        if grown > self.leak_mib * MIB:
            self._attempts.warn(
                f"memory between steps grew by {size_text(grown)} within {steps} optimizer steps, to {size_text(now)}: "
                "something keeps tensors, often a list of losses without .detach(), or metrics that are never reset",
                kind="leak",
            )

    # --- the end ---------------------------------------------------------------------------------

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the timeline and print the summary."""
        self._end(trainer)
        if trainer.is_global_zero:
            self._attempts.result("cannot write the timeline", self._write_timeline)
            rank_zero_info(self.describe())

    def describe(self) -> str:
        """Summary of the profile, in a few lines."""
        lines = []
        if self.breakdown is not None:
            parts = ", ".join(f"{name.replace('_', ' ')} {size_text(n)}" for name, n in self.breakdown.bytes.items())
            at = f"step {self._sampled} at its fullest, in the {self.breakdown.phase} phase"
            lines.append(f"memory of {at}: {size_text(self.breakdown.total)} = {parts}")
            top = ", ".join(f"{name} {size_text(size)}" for name, _, size in self.breakdown.modules[:3])
            lines += [f"most activations: {top}"] if top else []
        peak = host_peak()
        resident = "" if peak is None else f"the process's largest resident size: {size_text(peak)}; "
        lines.append(f"{resident}see {self._folder}")
        return "\n".join(lines)

    def _write_timeline(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        write_csv(self._folder / "memory_timeline.csv", self.timeline)
        write_csv(self._folder / "memory_step.csv", self._rows_of_step)
        if not self.picture:
            return
        title = f"optimizer step {self._sampled}, by purpose" if self._rows_of_step else "no step was sampled"
        try:
            write_picture(self._folder / "memory_timeline.png", self.timeline, self._rows_of_step, title)
        except ModuleNotFoundError as error:
            self._attempts.warn(f"no picture: {error.name} is missing; pip install 'lit-ft-callbacks[plots]'")

    def snapshot(self, path: str | Path) -> bool:
        """Write CUDA's memory snapshot, for https://pytorch.org/memory_viz; False where there is no CUDA."""
        if self._device.type != "cuda":
            self._attempts.warn(f"no memory snapshot: {self._device.type} has none")
            return False
        torch_internals.dump_memory_snapshot(str(path))
        return True

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Report on an out-of-memory error of ``fit``, and write the timeline so far; every error is raised on."""
        is_fit = trainer.state.fn == TrainerFn.FITTING
        if is_fit and is_out_of_memory(exception):
            self._attempts.result("cannot report on the error", partial(self._explain, trainer, pl_module, exception))
        self._end(trainer)
        if is_fit and trainer.is_global_zero and (self.timeline or self._rows_of_step):
            self._attempts.result("cannot write the timeline", self._write_timeline)

    def _explain(self, trainer: Trainer, pl_module: LightningModule, error: BaseException) -> None:
        when = f"optimizer step {self._steps + 1}"
        if self._ledger is not None:
            self._ledger.switch(self._phase)  # type: ignore[arg-type]
            self._close_ledger(trainer, pl_module)
            when += ", up to the error"
        elif self.breakdown is not None:
            when = f"optimizer step {self._sampled}"
        breakdown = self.breakdown or _known_beforehand(trainer, pl_module, self._device)
        device = in_mib(
            {
                "allocated": memory_readings.allocated(self._device),
                "reserved": memory_readings.reserved(self._device),
                "host peak rss": host_peak(),
            }
        )
        readings = [f"The device is {self._device}; " + ", ".join(f"{k[:-4]} {v:,.1f} MiB" for k, v in device.items())]
        page = out_of_memory_page(
            str(error),
            failed_in(trainer) or self._phase,
            breakdown,
            when,
            readings,
            trainer.world_size,
            is_split(pl_module),
        )
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"out_of_memory_rank{trainer.global_rank}.md"
        path.write_text(page, encoding="utf-8")
        if self._device.type == "cuda":
            self.snapshot(path.with_suffix(".pickle"))
        rank_zero_warn(f"MemoryProfiler: {_first_bold(page)} See {path}")

    def _end(self, trainer: Trainer) -> None:
        if self._ledger is not None:
            self._ledger.__exit__(None, None, None)
            self._ledger = None
        if self._is_watching:
            unwatch(trainer, self._switch)
            self._is_watching = False


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is an out-of-memory error of the CUDA, MPS or CPU allocator."""
    messages = ("out of memory", "can't allocate memory")
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in messages)
    )


def _gradients(module: LightningModule) -> Iterator[Tensor]:
    return (p.grad for p in module.parameters() if p.grad is not None)


def _states(trainer: Trainer) -> Iterator[Tensor]:
    """Tensors of the optimizer states, at any level of nesting."""
    for optimizer in trainer.optimizers:
        yield from tensors_in(optimizer.state)


def _known_beforehand(trainer: Trainer, pl_module: LightningModule, device: torch.device) -> Breakdown:
    """Breakdown without a sampled step: known sizes; on CUDA the remainder of the peak counts as activations."""
    parameters = local_bytes(pl_module.parameters())
    gradients = local_bytes(p for p in pl_module.parameters() if p.requires_grad)
    states = local_bytes(_states(trainer))
    peaks = memory_readings.take_peaks(device)
    rest = 0 if peaks is None else max(peaks[0] - parameters - gradients - states, 0)
    purposes: dict[Purpose, int] = {"parameters": parameters, "gradients": gradients, "optimizer_state": states}
    return Breakdown(purposes | {"activations": rest, "other": 0}, "other", {}, [], 0, {})


def _first_bold(page: str) -> str:
    return next(line for line in page.splitlines() if line.startswith("**")).replace("*", "")
