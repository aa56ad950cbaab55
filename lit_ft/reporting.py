"""What a run says at its start and its end, and where its metrics go."""

import csv
import io
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only, rank_zero_warn
from lit_callbacks.manifest import write_durably
from tensorboard.compat.proto.summary_pb2 import Summary
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from lit_ft import prompt_learning
from lit_ft.accumulation import accumulation, optimizer_steps
from lit_ft.causal_lm import CausalLM
from lit_ft.checkpointing.failures import explain_failed_write
from lit_ft.checkpoints_io import WeightCount
from lit_ft.data.batching import RowLoader
from lit_ft.data.streaming import StreamLoader
from lit_ft.run_folder import RunFolder

MIB = 2**20


class ConsoleSummary(Callback):
    """One line about what is trained when training starts, one about what came of it when it ends."""

    def __init__(self, run: RunFolder) -> None:
        """Report on a run.

        Args:
            run: its folder.
        """
        self.run = run
        self._started = 0.0
        self._said = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say what is trained, on what, for how long."""
        self._started, self._said = time.perf_counter(), trainer.global_step
        if isinstance(pl_module, CausalLM):
            rank_zero_info(f"training {describe_model(pl_module)}")
            if pl_module.init == "random" and pl_module.peft is not None:
                rank_zero_info(
                    "the frozen base is random and in no checkpoint: the same seed_everything draws it again"
                )
        rank_zero_info(f"on {describe_devices(trainer)}, {describe_steps(trainer)}")
        put_losses_on_one_chart(trainer)
        rank_zero_info(f"run folder: {self.run.root}")

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Where there is no progress bar, write a line twenty times a run."""
        if trainer.progress_bar_callback is not None or trainer.global_step == self._said:
            return
        every = max(1, int(min(optimizer_steps(trainer), 20_000)) // 20)
        if trainer.global_step % every == 0:
            self._said = trainer.global_step
            rank_zero_info(f"step {trainer.global_step:,}: {describe_metrics(trainer)}")

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say what came of it, and what to do next."""
        if isinstance(trainer.train_dataloader, StreamLoader):
            for line in trainer.train_dataloader.describe():
                rank_zero_info(line)
        loss = trainer.callback_metrics.get("train/loss")
        ending = "" if loss is None else f", last train/loss {float(loss):.4f}"
        seconds = time.perf_counter() - self._started
        if (size := describe_checkpoint(trainer, pl_module)) is not None:
            rank_zero_info(size)
        rank_zero_info(f"done: {trainer.global_step:,} optimiser steps in {seconds:.0f} s{ending}; see {self.run.root}")
        module: Any = pl_module
        if self.run.merged.exists() or prompt_learning.method_of(getattr(module, "model", None)):
            rank_zero_info(f"next: python -m lit_ft predict --config {self.run.config} --ckpt_path last")
        else:
            is_quantised = isinstance(module, CausalLM) and getattr(module.base_model, "is_quantized", False)
            choice = " --quantized-base dequantize" if is_quantised else ""
            rank_zero_info(f"next: python -m lit_ft export --run {self.run.root} --merge{choice}")


def put_losses_on_one_chart(trainer: Trainer) -> None:
    """In TensorBoard's custom scalars, show the loss of each source beside the total."""
    layout = {
        "loss by source": {
            stage: ["Multiline", [f"^{stage}/loss$", f"^{stage}/loss/.*$"]] for stage in ("train", "val")
        }
    }
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_custom_scalars(layout)


def describe_model(module: CausalLM) -> str:
    """Method, base model, parameters and dtypes in a line."""
    model = module.model
    assert model is not None
    assert module.weight_count is not None
    count, total, _ = module.weight_count
    method = "all weights" if module.peft is None else module.peft.peft_type.value
    dtypes = " + ".join(sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()}))
    start = "" if module.init == "pretrained" else " (random weights)"
    return (
        f"{method} of {module.pretrained}{start}: {count:,} of {total:,} parameters ({count / total:.2%}), {dtypes}, "
        f"attention {module.base_model.config._attn_implementation}"
    )


def describe_checkpoint(trainer: Trainer, module: LightningModule) -> str | None:
    """The newest checkpoint's size beside that of what trains; None where none was written."""
    path = Path(getattr(trainer.checkpoint_callback, "last_model_path", None) or "")
    if not path.name or not path.exists():
        return None
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    size = sum(file.stat().st_size for file in files)
    count: WeightCount = getattr(module, "weight_count", None) or WeightCount.of(module)
    trains = count.trained_bytes / MIB
    return f"checkpoint: {path}, {size / MIB:,.1f} MiB; the weights that train are {trains:,.1f} MiB of it"


def describe_metrics(trainer: Trainer) -> str:
    """What the progress bar would show: loss, learning rate, tokens per second."""
    metrics = trainer.progress_bar_metrics
    return ", ".join(f"{name} {value:,.4g}" for name, value in metrics.items() if not isinstance(value, str))


def describe_devices(trainer: Trainer) -> str:
    """Devices, strategy and precision in a few words."""
    device = trainer.strategy.root_device.type
    return f"{trainer.world_size} x {device} ({type(trainer.strategy).__name__}, precision {trainer.precision})"


def describe_steps(trainer: Trainer) -> str:
    """Optimiser steps, and the rows and tokens of one."""
    steps = optimizer_steps(trainer)
    loader: Any = trainer.train_dataloader
    if isinstance(loader, StreamLoader):
        return f"{steps} optimiser steps of a stream; {loader.buffer_rows:,} rows are shuffled at a time"
    if not isinstance(loader, RowLoader):
        return f"{steps} optimiser steps"
    draws, tokens, supervised = loader.epoch_size()
    per_epoch = -(-loader.batches // accumulation(trainer, 0))
    return (
        f"{steps:,} optimiser steps; an epoch is {draws:,} samples, {tokens:,} tokens ({supervised / tokens:.0%} "
        f"supervised) in {per_epoch:,} steps of about {tokens // max(per_epoch, 1):,} tokens"
    )


def show_progress_on_terminals_only() -> None:
    """Leave out transformers' bars for reading and writing weights in files and pipes."""
    if not sys.stderr.isatty():
        disable_progress_bar()


class MetricsCSV(CSVLogger):
    """``metrics.csv`` in the run folder; a resumed run goes on in it, without rows of steps that it repeats."""

    def __init__(self, run: RunFolder, resumed_step: int = 0, is_logged: bool = True) -> None:
        """Log into a run's folder.

        Args:
            run: its folder.
            resumed_step: optimizer steps of the checkpoint that the run resumes from; 0 where it starts.
            is_logged: whether the metrics of its last step were logged before it was written.
        """
        # Lightning saves after whatever it logs itself, which is the last of a logged step: nothing of it is lost when
        # the process is killed. What a callback logs between such steps is written with the next.
        super().__init__(run.root, name="", version="", flush_logs_every_n_steps=sys.maxsize)
        self.resumed_step, self.is_logged = resumed_step, is_logged

    @property
    def experiment(self) -> Any:
        """The writer; the first access drops rows of steps after the checkpoint that the run resumes from."""
        if self._experiment is None and rank_zero_only.rank == 0:  # type: ignore[attr-defined]
            self._experiment = _MetricsFile(self.log_dir, self.resumed_step, self.is_logged)
        return super().experiment


class _MetricsFile(ExperimentWriter):
    """Appends rows; where a new column needs another header, the file is replaced in one step."""

    def __init__(self, folder: str, resumed_step: int, is_logged: bool) -> None:
        self._resumed_step, self._is_logged = resumed_step, is_logged
        super().__init__(folder)

    def _check_log_dir_exists(self) -> None:
        # Lightning's deletes the file here.
        path = Path(self.metrics_file_path)
        if not path.is_file():
            return
        kept, dropped = _rows_before(self._resumed_step, self._is_logged, _read_rows(path))
        self.metrics_keys = sorted({key for row in kept for key in row})
        self._replace(kept)
        if dropped:
            rank_zero_info(
                f"{path}: {len(dropped):,} rows of steps after {self._resumed_step:,}, which the run resumes from, are "
                "dropped; it trains and logs these steps again"
            )

    def save(self) -> None:
        """Write what was logged since the last time.

        Raises:
            RecipeError: it cannot be written.
        """
        path = Path(self.metrics_file_path)
        if self.metrics:
            with explain_failed_write(path):
                self._append(path)

    def _append(self, path: Path) -> None:
        if self.metrics_keys and not path.is_file() and path.parent.is_dir():
            rank_zero_warn(f"{path} was removed while the run ran, with the rows before this one; a new one is begun")
        rows: list[dict[str, Any]] = list(self.metrics)
        columns = sorted({*self.metrics_keys, *(key for row in rows for key in row)})
        if columns != self.metrics_keys or not path.is_file():
            earlier = _read_rows(path) if path.is_file() else []
            self.metrics_keys = columns
            self._replace([*earlier, *rows])
        else:
            _append_all_or_nothing(path, _as_csv(columns, rows))
        self.metrics = []

    def _replace(self, rows: list[dict[str, Any]]) -> None:
        text = _as_csv(self.metrics_keys, [dict(zip(self.metrics_keys, self.metrics_keys, strict=True)), *rows])
        write_durably(Path(self.metrics_file_path), text)


def _append_all_or_nothing(path: Path, text: str) -> None:
    size = path.stat().st_size
    try:
        with path.open("a", encoding="utf-8", newline="") as file:
            file.write(text)
    except OSError:
        # A full disk takes a part of a row, and Lightning writes once more when the run fails.
        with suppress(OSError):
            os.truncate(path, size)
        raise


def _as_csv(columns: list[str], rows: list[dict[str, Any]]) -> str:
    text = io.StringIO()
    csv.DictWriter(text, columns).writerows(rows)
    return text.getvalue()


def _read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a metrics file, each with the values that it has; cut ones (kill, full disk) are left out."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    columns, *rows = list(csv.reader(line for line in lines if line.endswith("\n"))) or [[]]
    complete = [dict(zip(columns, row, strict=True)) for row in rows if len(row) == len(columns)]
    return [{key: value for key, value in row.items() if value != ""} for row in complete]


def _rows_before(
    step: int, is_logged: bool, rows: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows that were logged until a checkpoint was written, and later ones.

    Lightning, whose rows have an epoch, counts steps from 0: the last one before the checkpoint is ``step - 1``, or the
    one before it where that was not logged yet. Callbacks that log by themselves count the steps that were taken.
    """
    kept: list[dict[str, Any]] = []
    dropped: list[dict[str, Any]] = []
    for row in rows:
        last = step - 1 - (not is_logged) if "epoch" in row else step
        is_before = step > 0 and str(row.get("step")).isdigit() and int(row["step"]) <= last
        (kept if is_before else dropped).append(row)
    return kept, dropped


class StepEvents(TensorBoardLogger):
    """TensorBoard's logger with one event for all figures of a call.

    The writer takes ten events and lets the training thread wait for its own, which computes checksums in Python.
    """

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Write figures of a step; what is no number goes Lightning's way, one by one.

        Args:
            metrics: numbers or scalars by their names.
            step: that they are of.
        """
        with explain_failed_write(Path(self.log_dir)):
            self._write(metrics, step)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Write what has not been written.

        Args:
            status: how the run has ended.
        """
        with explain_failed_write(Path(self.log_dir)):
            super().finalize(status)

    def _write(self, metrics: Mapping[str, Any], step: int | None) -> None:
        file = self.experiment.file_writer
        if file is None or self._prefix or not all(isinstance(v, int | float | Tensor) for v in metrics.values()):
            super().log_metrics(metrics, step)
            return
        values = [Summary.Value(tag=name, simple_value=float(value)) for name, value in metrics.items()]
        file.add_summary(Summary(value=values), step)
