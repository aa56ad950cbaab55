"""Console summary of a run at its start and end, and chart layout of its losses."""

import re
import sys
import time

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lit_callbacks.internals.lightning_internals import attributes_of
from lit_callbacks.output.quantities import as_count
from transformers import PretrainedConfig
from transformers.utils.logging import disable_progress_bar

from lit_ft.accumulation import accumulation, optimizer_steps
from lit_ft.checkpointing.selection import newest_of
from lit_ft.checkpointing.storage.checkpoint_io import WeightCount
from lit_ft.data.loaders.batching import PackedBatchLoader
from lit_ft.data.loaders.streaming import StreamLoader
from lit_ft.internals.transformers import attention_implementation
from lit_ft.process import describe_threads
from lit_ft.protocols import LearnsFromTeacher, LearnsPreferences, SamplesAnswers
from lit_ft.run.folder import RunFolder
from lit_ft.run.next_command import next_command
from lit_ft.run.progress import StepTimes, describe_metrics
from lit_ft.training.causal_lm import CausalLM

MIB = 2**20
SECONDS_BETWEEN_LINES = 30
"""Longest time without a line about the progress, where there is no bar."""


class ConsoleSummary(Callback):
    """Lines about model, devices and length when training starts, and about its result when it ends.

    ``options`` are those that every further command of the run needs, with a space before.
    """

    def __init__(self, run: RunFolder, options: str = "") -> None:
        self.run, self.options = run, options
        self._times: StepTimes | None = None
        self._said = 0
        self._said_at = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print model, devices, number of steps and run folder."""
        self._times = StepTimes.of(trainer)
        self._said, self._said_at = trainer.global_step, time.monotonic()
        if isinstance(pl_module, CausalLM):
            for line in (f"training {describe_model(pl_module)}", *pl_module.expert_notes):
                rank_zero_info(line)
            if (draws := describe_draws(pl_module.base_model.config)) is not None:
                rank_zero_info(draws)
            if pl_module.spec.base.init == "random" and pl_module.spec.tuning.peft is not None:
                rank_zero_info(
                    "the frozen base is random and in no checkpoint: the same seed_everything draws it again"
                )
        rank_zero_info(f"on {describe_devices(trainer)}, {describe_steps(trainer)}")
        put_losses_on_one_chart(trainer)
        rank_zero_info(f"run folder: {self.run.root}")

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        """Print step, time left and metrics about twenty times per run and at least every 30 s; not beside a bar."""
        if trainer.progress_bar_callback is not None or self._times is None:
            return
        every = max(1, int(min(self._times.steps, 20_000)) // 20)
        is_due = trainer.global_step != self._said and trainer.global_step % every == 0
        if is_due or self._is_quiet():
            self._said = trainer.global_step
            # Those for the bar are of the step before where a GPU trains.
            on_bar = trainer.progress_bar_metrics
            of_step = {name: value for name, value in trainer.callback_metrics.items() if name in on_bar}
            self._say(trainer, describe_metrics({**on_bar, **of_step}, "train"))

    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        """Print how far a long validation is, at least every 30 s."""
        if trainer.progress_bar_callback is None and self._times is not None and self._is_quiet():
            done, batches = (
                trainer.fit_loop.epoch_loop.val_loop.batch_progress.current.completed,
                trainer.num_val_batches,
            )
            total = sum(batches) if isinstance(batches, list) else batches
            self._say(trainer, f"validation, batch {done + 1:,} of {total:,}")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the metrics of a validation once, where they are new."""
        if self._times is not None and not trainer.sanity_checking:
            self._say(trainer, describe_metrics(trainer.progress_bar_metrics, "val"))

    def _is_quiet(self) -> bool:
        return time.monotonic() - self._said_at >= SECONDS_BETWEEN_LINES

    def _say(self, trainer: Trainer, what: str) -> None:
        assert self._times is not None
        self._said_at = time.monotonic()
        if what:
            rank_zero_info(f"{self._times.describe(trainer.global_step)}: {what}")

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the result and the next command."""
        if isinstance(trainer.train_dataloader, StreamLoader):
            for line in trainer.train_dataloader.describe():
                rank_zero_info(line)
        if (size := describe_checkpoint(self.run, pl_module)) is not None:
            rank_zero_info(size)
        for reason in reasons_of_early_stops(trainer):
            rank_zero_info(f"EarlyStopping ended the run: {reason}")
        rank_zero_info(f"done: {self._describe_end(trainer)}; see {self.run.root}")
        if trainer.is_global_zero and (command := next_command(self.run, trainer, pl_module)) is not None:
            rank_zero_info(f"next: {command}{self.options}")

    def _describe_end(self, trainer: Trainer) -> str:
        if self._times is None:  # Lightning starts no training where a resumed run is at its end
            return f"nothing was left to train after {as_count(trainer.global_step, 'optimizer step')}"
        first = self._times.first_step
        earlier = f" after {first:,} earlier {'ones' if first > 1 else 'one'}" if first else ""
        loss = trainer.callback_metrics.get("train/loss")
        ending = "" if loss is None else f", last train/loss {float(loss):.4f}"
        taken = as_count(trainer.global_step - first, "optimizer step")
        return f"{taken}{earlier} in {self._times.seconds():.0f} s{ending}"


def reasons_of_early_stops(trainer: Trainer) -> list[str]:
    """Why callbacks of Lightning ended a run before its last step; they say it only with ``verbose: true``."""
    callbacks = (one for one in attributes_of(trainer).callbacks if isinstance(one, EarlyStopping))
    reasons = [one.stopping_reason_message for one in callbacks if trainer.should_stop]
    return [reason.removesuffix(" Signaling Trainer to stop.") for reason in reasons if reason]


def put_losses_on_one_chart(trainer: Trainer) -> None:
    """Add a TensorBoard layout (custom scalars) that shows the loss of each source beside the total."""
    layout = {
        "loss by source": {
            stage: ["Multiline", [f"^{stage}/loss$", f"^{stage}/loss/.*$"]] for stage in ("train", "val")
        }
    }
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_custom_scalars(layout)


def describe_model(module: CausalLM) -> str:
    """Text with tuning method, base model, number of parameters and dtypes."""
    model = module.model
    assert model is not None
    assert module.weight_count is not None
    count, total, _ = module.weight_count
    base = module.spec.base
    dtypes = " + ".join(sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()}))
    start = "" if base.init == "pretrained" else " (random weights)"
    objective = f" by {module.objective!r}" if isinstance(module, LearnsPreferences) else ""
    if isinstance(module, LearnsFromTeacher):
        objective = f" on {module.describe_objective()}"
    elif isinstance(module, SamplesAnswers):
        objective = f" on {module.describe_policy()}"
    if (weights := module.spec.token_weights) is not None:
        objective = f", tokens weighted by {weights!r}"
    return (
        f"{module.spec.tuning.method} of {base.pretrained}{start}{objective}: {count:,} of {total:,} parameters "
        f"({count / total:.2%}), {dtypes}, attention {attention_implementation(module.base_model.config)}"
    )


def describe_draws(config: PretrainedConfig) -> str | None:
    """Text on random numbers that the base model draws in training, by its config; None if it draws none."""
    values = config.get_text_config().to_dict().items()
    numbers = {name: value for name, value in values if type(value) in (int, float) and value > 0}
    draws = [f"{name}={value:g}" for name, value in numbers.items() if _DRAWS.match(name)]
    if config.model_type == "phimoe":  # whose router_jitter_noise is a threshold
        draws = ["routers sample each token's experts", *(draw for draw in draws if "router" not in draw)]
    if not draws:
        return None
    return (
        f"config.json: the base model draws random numbers in training ({', '.join(draws)}), so that a step's loss "
        "depends on its split into micro-batches and ranks; model.config_overrides can set such numbers to 0"
    )


_DRAWS = re.compile(r"(?!summary|classifier).*(drop|jitter)")
"""Names of a config's probabilities and noise, without those of heads that predict classes."""


def describe_checkpoint(run: RunFolder, module: LightningModule) -> str | None:
    """Text with the sizes of the newest checkpoint and of the trainable parameters; None without a checkpoint."""
    if (path := newest_of(run.checkpoints.glob("*.ckpt"))) is None:
        return None
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    size = sum(file.stat().st_size for file in files)
    count = module.weight_count if isinstance(module, CausalLM) else None
    count = count or WeightCount.of(module)
    trains = count.trained_bytes / MIB
    return f"checkpoint: {path}, {size / MIB:,.1f} MiB; the weights that train are {trains:,.1f} MiB of it"


def describe_devices(trainer: Trainer) -> str:
    """Text with devices, threads on a CPU, strategy and precision."""
    device = trainer.strategy.root_device.type
    parts = [describe_threads()] if device == "cpu" else []
    parts += [type(trainer.strategy).__name__, f"precision {trainer.precision}"]
    return f"{trainer.world_size} x {device} ({', '.join(parts)})"


def describe_steps(trainer: Trainer) -> str:
    """Text with the number of optimizer steps, and the samples and tokens of an epoch.

    Where a mixture or ``limit_train_batches`` leaves samples out of an epoch, it says of how many.
    """
    steps = optimizer_steps(trainer)
    loader: object = trainer.train_dataloader
    if isinstance(loader, StreamLoader):
        return f"{as_count(steps, 'optimizer step')} of a stream; {loader.buffer_rows:,} rows are shuffled at a time"
    if not isinstance(loader, PackedBatchLoader):
        return as_count(steps, "optimizer step")
    draws, tokens, supervised = loader.epoch_size()
    per_epoch = -(-loader.batches // accumulation(trainer, 0))
    per_step = tokens // max(per_epoch, 1)
    total = len(loader.samples.lengths)
    what = loader.samples.kind
    judged = f" ({loader.samples.judgments})" if loader.samples.is_unpaired else ""
    if isinstance(trainer.lightning_module, SamplesAnswers):  # which trains on other answers than those of the data
        what = "prompt"
    drawn = f"{draws:,} of {as_count(total, what)}" if draws < total else as_count(draws, what)
    if what == "prompt":
        each = f"{as_count(per_epoch, 'step')} of about {draws // max(per_epoch, 1):,}"
        return f"{as_count(steps, 'optimizer step')}; an epoch is {drawn} in {each}"
    return (
        f"{as_count(steps, 'optimizer step')}; an epoch is {drawn}{judged}, {tokens:,} tokens "
        f"({supervised / tokens:.0%} supervised) in {as_count(per_epoch, 'step')} of about {per_step:,} tokens"
    )


def show_progress_on_terminals_only() -> None:
    """Disable transformers' progress bars for weights if stderr is a file or a pipe."""
    if not sys.stderr.isatty():
        disable_progress_bar()
