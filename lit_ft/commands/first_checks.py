"""Checks of a built run before weights are loaded: strategy, model, optimizer, callbacks and data."""

from dataclasses import dataclass
from pathlib import Path

from jsonargparse import Namespace
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable, ReduceLROnPlateau
from lit_callbacks.protocols import tokenizer_of
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from lit_ft.checkpointing.storage.checkpoint_io import (
    check_fit,
    check_readable,
    saved_shapes,
    saved_value,
    trainable_shapes,
)
from lit_ft.data.text_data import TextDataModule
from lit_ft.errors import RecipeError, explained
from lit_ft.export.adapter_folders import check_unchanged
from lit_ft.internals.peft import virtual_tokens
from lit_ft.model.files.fingerprint import check_same_base, check_same_form
from lit_ft.model.isolation import architectures
from lit_ft.process import resume_threads
from lit_ft.protocols import ChecksModel, ChecksOptimizer, ChecksRecipe, LearnsFromTeacher
from lit_ft.recipe.callback_checks import (
    LoggedMetrics,
    check_callbacks,
    check_schedule,
    log_own_metrics,
    losses_of_sources,
)
from lit_ft.recipe.checks import allow_one_loader
from lit_ft.recipe.trainer_checks import warn_of_no_validation, warn_of_options_without_effect
from lit_ft.run import predictions
from lit_ft.run.launching import is_rank_zero
from lit_ft.run.repeated_lines import without_repetitions
from lit_ft.training.answer_scores.exact_match import ExactMatch, prompts_of
from lit_ft.training.causal_lm import CausalLM
from lit_ft.training.optimizers.configure import check_total_steps, try_out
from lit_ft.training.optimizers.initial_state import InitialAdamState
from lit_ft.training.steps.lightning_callbacks import check_accumulation, check_average, check_lightning_callbacks
from lit_ft.training.steps.lightning_strategies import check_lightning_strategy
from lit_ft.tuning import wrapping
from lit_ft.tuning.adapters import recorded_options
from lit_ft.tuning.compatibility import check_situation
from lit_ft.tuning.targets import unmerged

HASHED_BASE_BYTES = 16 * 2**30
"""Largest base model, in bytes, whose SHA-256 sums are compared before loading: some seconds, four files at a time."""

Schedule = LRScheduler | ReduceLROnPlateau


@dataclass(frozen=True)
class FirstChecks:
    """Checks of a run before its weights are loaded, and what they look at."""

    stage: str
    """``fit``, ``validate``, ``test`` or ``predict``."""
    options: Namespace
    """The recipe. Where it differs from the trainer, it is what the run will do: ``check`` builds a bare trainer."""
    trainer: Trainer
    data: LightningDataModule
    callbacks: list[Callback]
    """Callbacks of the recipe, without lit_ft's own."""
    optimizer: OptimizerCallable | None
    lr_scheduler: LRSchedulerCallable | None

    def run(self, model: LightningModule) -> Schedule | None:
        """Make all checks, and load the data; returns the schedule of an optimizer of small tensors.

        Raises:
            RecipeError: parts of the recipe do not fit each other, the data, the base model or the checkpoint.
        """
        is_fit, strategy, schedule = self.stage == "fit", self._strategy, None
        if is_fit and isinstance(model, CausalLM):
            check_lightning_strategy(type(self.trainer.strategy))
            check_lightning_callbacks(self.callbacks, self.trainer.strategy)
            check_accumulation(self.callbacks, self.options.trainer.accumulate_grad_batches, self.trainer.strategy)
        if isinstance(strategy, ChecksRecipe):
            strategy.check(self.trainer, model, self.data)
        if isinstance(model, CausalLM):
            skeleton = self._check_model(model)
            if isinstance(model, LearnsFromTeacher) and self.stage != "predict":
                model.check_teacher()
            warn_of_options_without_effect(self.options.trainer, skeleton, self.data)
            if self.options.get("merge"):
                _check_merge(model, skeleton)
            if is_fit:
                schedule = self._try_optimizer(skeleton)
                self._check_steps(model, schedule)
            allow_one_loader(self.data)
        if isinstance(self.data, TextDataModule):
            self._check_data(self.data, model)
        return schedule

    @property
    def _strategy(self) -> object:
        """The strategy, by which of the protocols it has."""
        return self.trainer.strategy

    @property
    def _checkpoint(self) -> str | None:
        return self.options.ckpt_path

    def _check_model(self, model: CausalLM) -> nn.Module:
        """Check the model, and the checkpoint that its weights come from; returns the model on the meta device."""
        _check_folders(model)
        if self._checkpoint is not None:
            model.start = saved_value(self._checkpoint, "adapter_start")
            if self.stage == "fit" and self.trainer.world_size == 1:
                resume_threads(saved_value(self._checkpoint, "threads"))
        with without_repetitions():
            skeleton = model.check()
        architectures.check_precision(model.spec.base.config, str(self.trainer.precision))
        strategy = self._strategy
        if isinstance(strategy, ChecksModel):
            strategy.check_model(model, skeleton)
        if self._checkpoint is not None:
            if not wrapping.takes_shapes_from_weights(model.spec.tuning.peft):
                shapes = {f"model.{name}": shape for name, shape in trainable_shapes(skeleton).items()}
                check_fit(saved_shapes(self._checkpoint), shapes)
            check_same_base(saved_value(self._checkpoint, "base"), model.base_fingerprint, "the checkpoint")
            check_same_form(saved_value(self._checkpoint, "base_form"), model.spec.base.form())
            recorded_options.check_same(skeleton, saved_value(self._checkpoint, "method_options") or {})
        return skeleton

    def _try_optimizer(self, skeleton: nn.Module) -> Schedule | None:
        """Build optimizer and schedule for a few small parameters, so that bad arguments fail before weights load."""
        if self.optimizer is None:
            return None
        with explained("optimizer", "fix its init_args"):
            built = try_out(self.optimizer, skeleton, takes_step=self.trainer.strategy.root_device.type == "cpu")
        check_readable(built.state_dict(), f"optimizer={type(built).__module__}.{type(built).__name__}")
        check_average(self.callbacks, [built])
        for callback in self.callbacks:
            if isinstance(callback, InitialAdamState) and self._checkpoint is None:  # a resumed run keeps its state
                callback.check(built, skeleton)
        strategy = self._strategy
        if isinstance(strategy, ChecksOptimizer):
            strategy.check_optimizer(built)
        if self.lr_scheduler is None:
            return None
        with explained("lr_scheduler", "fix its init_args"):
            return self.lr_scheduler(built)

    def _check_steps(self, model: CausalLM, schedule: Schedule | None) -> None:
        """Check that callbacks and schedule get the validations and the steps that they wait for."""
        has_data = self.data.splits.validates if isinstance(self.data, TextDataModule) else True
        validates = bool(has_data and self.options.trainer.limit_val_batches != 0)
        if not validates:
            warn_of_no_validation(self.options.trainer)
        logs_more = log_own_metrics([model, *self.callbacks])
        losses = losses_of_sources(self.data) if isinstance(self.data, TextDataModule) else None
        logged = LoggedMetrics(validates, logs_more, losses, model.measured, model.spec.token_weights is not None)
        check_callbacks(self.callbacks, logged)
        check_schedule(schedule, logged)
        check_total_steps(schedule, self.trainer)

    def _check_data(self, data: TextDataModule, model: LightningModule) -> None:
        """Load the data; check its lengths, and its order where a run goes on in it."""
        if isinstance(model, CausalLM):
            model.check_length("data.max_length", data.requested_length)
        data.take_rows_of(model)
        data.load(tokenizer_of(model), self.stage)
        if isinstance(model, CausalLM):
            model.check_length("the longest sample", data.splits.longest_sample)
            if self.stage == "predict":
                predictions.check_prompts(
                    data.questions or [],
                    model.tokenizer,
                    model.spec.base.config,
                    model.max_new_tokens,
                    _name(model),
                    virtual_tokens(model.spec.tuning.peft),
                )
        if self.stage == "fit" and "val" in data.splits and any(isinstance(one, ExactMatch) for one in self.callbacks):
            prompts_of(data, "val")
        if self.stage == "fit" and self._checkpoint is not None:
            data.resume_data = self.options.resume_data
            data.check_order(saved_value(self._checkpoint, type(data).__qualname__) or {})


def _name(model: CausalLM) -> str:
    return f"model.pretrained={model.spec.base.pretrained!r}"


def _check_folders(model: CausalLM) -> None:
    """Compare a base model and a given adapter that ``export`` or ``merge`` has written with their manifests.

    Sizes are compared on all ranks; SHA-256 sums on rank 0, of folders up to ``HASHED_BASE_BYTES``. Loading then
    reads the same bytes from the file cache of the operating system.
    """
    folder = Path((base := model.spec.base).pretrained).expanduser()
    if base.init == "pretrained" and folder.is_dir():
        check_unchanged(folder, HASHED_BASE_BYTES if is_rank_zero() else 0)
    if (given := model.spec.tuning.given) is not None:
        check_unchanged(given)


def _check_merge(model: CausalLM, skeleton: nn.Module) -> None:
    check_situation(model.spec.tuning.peft, "merge", "merge=true")
    unmerged.check_merged(skeleton)
    if model.spec.base.is_quantized:
        raise RecipeError(
            "merge=true, but the base is quantized, and merging into it has a price that is yours to choose; "
            "leave merge out, and after training: python -m lit_ft export --run RUN --merge --quantized-base "
            "dequantize (or keep)"
        )
