"""Contents of a checkpoint besides Lightning's own: trainable weights, state of the tuning method, base model."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lit_ft.checkpointing.buffers import BufferWatch
from lit_ft.checkpointing.resume import Replay, go_back_to_a_step
from lit_ft.checkpointing.selection import has_training_state, weights_alone
from lit_ft.checkpointing.storage.checkpoint_io import check_fit, check_readable, shapes_of, trainable_shapes
from lit_ft.checkpointing.storage.sharded import SAVED_GROUPS
from lit_ft.errors import RecipeError
from lit_ft.internals.lightning import TRAINED
from lit_ft.model.files.fingerprint import BaseForm, Fingerprint, check_same_base, check_same_form, warn_of_other_form
from lit_ft.protocols import Checkpoint, DescribesTraining
from lit_ft.training.loss.packed_forward import PackedForward
from lit_ft.training.loss.token_weights import TokenWeights
from lit_ft.training.optimizers.configure import PATTERN, check_total_steps, follow_run
from lit_ft.training.optimizers.recipe_options import GIVEN, RecipeOptions, check_same_schedule
from lit_ft.tuning import lora_init, method_hooks
from lit_ft.tuning.adapters import recorded_options
from lit_ft.tuning.lora_init import LoraInitState

_NO_OPTIONS = frozenset(("params", "param_names", "initial_lr", GIVEN))
"""Entries of an optimizer's groups that are no options of it."""
TRAINED_ON = "trained_on"
"""Key of what a checkpoint was trained on, and by what, as text."""


def trained_on(checkpoint: Checkpoint) -> str:
    """What a checkpoint was trained on, and by what."""
    if "objective" in checkpoint and TRAINED_ON not in checkpoint:
        return f"pairs of a better and a worse answer by `{checkpoint['objective']}`"
    # Earlier versions have a key for each module.
    texts = (checkpoint[key] for key in (TRAINED_ON, "distillation", "policy") if key in checkpoint)
    return str(next(texts, "the answers of the data"))


def _name_other_training(checkpoint: Checkpoint, now: str) -> None:
    if (before := trained_on(checkpoint)) != now:
        rank_zero_warn(f"model: the checkpoint was trained on {before}, and goes on with {now}")


class SavedState:
    """State that a module adds to checkpoints and reads from them; the frozen base stays in its own files.

    It is made once the model is built, before it is sharded; ``base`` is None where all weights train.
    """

    def __init__(
        self,
        module: LightningModule,
        forward: PackedForward,
        start: LoraInitState | None,
        base: Fingerprint | None,
        form: BaseForm,
        token_weights: TokenWeights | None,
    ) -> None:
        self.module, self.forward, self.start, self.base, self.form = module, forward, start, base, form
        self.token_weights = None if token_weights is None else repr(token_weights)
        self.shapes = trainable_shapes(module)
        self.buffers = BufferWatch(forward.base)
        self.optimizer_names: list[list[str]] = []
        """Names of the parameters of each optimizer, in its order."""
        self._optimizer_options: frozenset[str] = frozenset()
        self._saved_optimizer_options: frozenset[str] = frozenset()
        self._recipe_options: RecipeOptions | None = None
        self._groups: _Groups | None = None
        self._saved_groups: _Groups | None = None
        self._schedules: list[object] = []
        self._saved_schedules: list[Mapping[str, object]] | None = None
        """None unless a fit resumes."""
        self.replay: Replay | None = None
        """Micro-batches that a resumed run trains on again."""

    def name_parameters(self, optimizer: Optimizer, schedules: Sequence[object] = ()) -> None:
        """Store the names of an optimizer's parameters, which its own state only numbers, and note its schedules.

        Raises:
            RecipeError: the checkpoint that was read is that of another optimizer or schedule.
        """
        name_of = {id(p): name for name, p in self.module.named_parameters()}
        self.optimizer_names = [[name_of[id(p)] for group in optimizer.param_groups for p in group["params"]]]
        self._optimizer_options = frozenset(optimizer.param_groups[0])
        self._groups = _Groups.of(optimizer.param_groups, self.optimizer_names[0])
        self._recipe_options, self._schedules = RecipeOptions(optimizer, schedules), list(schedules)
        self._check_optimizer()

    def take_options_of_recipe(self, trainer: Trainer) -> None:
        """Give the optimizer that a checkpoint has restored the options that the recipe has changed since."""
        if self._recipe_options is not None:
            schedules = [config.scheduler for config in trainer.lr_scheduler_configs]
            for schedule in schedules:
                follow_run(schedule, trainer)
            self._recipe_options.take_over(trainer.optimizers[0], schedules)
            for schedule in schedules:  # which may have become the checkpoint's
                check_total_steps(schedule, trainer)
            if self._saved_schedules is not None and bool(self._saved_schedules) is not bool(schedules):
                rate = trainer.optimizers[0].param_groups[0]["lr"]
                rank_zero_warn(
                    "lr_scheduler: "
                    + (
                        "the checkpoint has none, so that it begins at its first step now"
                        if schedules
                        else f"the checkpoint has one and the recipe none: the learning rate stays at {rate:g}"
                    )
                    + "; to go on as before, resume with the lr_scheduler of the checkpoint"
                )

    def write(self, checkpoint: Checkpoint) -> None:
        """Reduce a checkpoint to the weights that train, and add the state.

        Raises:
            RecipeError: the state of an optimizer, a schedule or a callback could not be read again.
        """
        for weights in {"state_dict", TRAINED} & checkpoint.keys():
            checkpoint[weights] = {n: t for n, t in checkpoint[weights].items() if n in self.shapes}
        self.buffers.warn_of_changes(self.forward.base)
        checkpoint["optimizer_names"] = self.optimizer_names
        checkpoint["method_state"] = method_hooks.state_of(self.forward.model)
        checkpoint["method_options"] = recorded_options.options_of(self.forward.model)
        checkpoint["adapter_start"] = self.start
        checkpoint["base"] = self.base
        checkpoint["base_form"] = self.form.plain()
        checkpoint["token_weights"] = self.token_weights
        if isinstance(self.module, DescribesTraining):
            checkpoint[TRAINED_ON] = self.module.describe_training()
        if self.module.device.type == "cpu":
            checkpoint["threads"] = torch.get_num_threads()
        if self.replay is not None:
            checkpoint["validated_until"] = self.replay.until
        check_readable(checkpoint, "the checkpoint")

    def read(self, checkpoint: Checkpoint, trainer: Trainer | None) -> None:
        """Check that a checkpoint fits, and load its state.

        Args:
            checkpoint: Lightning's checkpoint; for a fit it is set back to the start of an optimizer step, in place.
            trainer: the module's trainer, of which a fit resumes and another function takes the weights alone.

        Raises:
            RecipeError: the checkpoint is that of another model or optimizer, the base has changed since, or a fit is
                to resume from weights alone.
        """
        if trainer is not None and trainer.state.fn != TrainerFn.FITTING:
            trainer = None
        if trainer is not None and not has_training_state(checkpoint):
            raise weights_alone(str(trainer.ckpt_path))
        lora_init.check_same(self.start, checkpoint.get("adapter_start"))
        recorded_options.check_same(self.forward.model, checkpoint.get("method_options", {}))
        here = trainable_shapes(self.module)  # fewer than trains where other ranks hold some of the layers
        saved = shapes_of(checkpoint["state_dict"])
        check_fit({n: shape for n, shape in saved.items() if n in here or n not in self.shapes}, here)
        if "base" in checkpoint:
            check_same_base(checkpoint["base"], self.base, "the checkpoint")
        check_same_form(checkpoint.get("base_form"), self.form)
        method_hooks.load_state(self.forward.model, checkpoint.get("method_state", {}))
        if trainer is not None:
            warn_of_other_form(checkpoint.get("base_form"), self.form)
            if (before := checkpoint.get("token_weights")) != (now := self.token_weights):
                rank_zero_warn(
                    f"model.token_weights: the checkpoint was trained with {before or 'none'}, and goes on with "
                    f"{now or 'none'}"
                )
            if isinstance(self.module, DescribesTraining):
                _name_other_training(checkpoint, self.module.describe_training())
            _complete_average(checkpoint, {n: t for n, t in self.module.state_dict().items() if n not in self.shapes})
            states = checkpoint.get("optimizer_states") or [{}]
            groups = states[0].get("param_groups", [])
            self._saved_optimizer_options = frozenset(option for group in groups[:1] for option in group)
            parts = [group for part in states[0].get("parts", []) for group in part["param_groups"]]
            names = checkpoint.get("optimizer_names") or [None]
            self._saved_groups = _Groups.of(*checkpoint.get(SAVED_GROUPS, [(groups or parts, names[0])])[0])
            self._saved_schedules = checkpoint.get("lr_schedulers") or []
            self._check_optimizer()
            self.replay = go_back_to_a_step(checkpoint, trainer)

    def _check_optimizer(self) -> None:
        """Compare the options of the optimizer and of the saved one, once both are known; versions only add some."""
        here, saved = (one - _NO_OPTIONS for one in (self._optimizer_options, self._saved_optimizer_options))
        if here and saved and here - saved and saved - here:
            raise RecipeError(
                f"the checkpoint is that of another optimizer, with {', '.join(sorted(saved - here))} and not "
                f"{', '.join(sorted(here - saved))}; resume with the optimizer that wrote it"
            )
        for schedule, state in zip(self._schedules, self._saved_schedules or [], strict=False):
            check_same_schedule(schedule, state)
        own, other = self._groups, self._saved_groups
        if own is not None and other is not None and own.differ(other):
            raise RecipeError(
                f"the checkpoint's optimizer has {other.describe()}, the recipe's {own.describe()}; resume with the "
                "model.lr_factors and model.no_weight_decay that wrote it, which are in config.yaml of its run"
            )

    def end_replay(self, trainer: Trainer, batch_idx: int | None = None) -> None:
        """End the replay at the micro-batch up to which the stopped run had validated; None ends it in any case."""
        if self.replay is not None and (batch_idx is None or batch_idx >= self.replay.until):
            self.replay.stop(trainer)
            self.replay = None


class _Groups(NamedTuple):
    """Groups of an optimizer's weights."""

    patterns: list[str | None]
    """Patterns of ``lr_factors``."""
    sizes: list[int]
    names: list[list[str]] | None
    """Names of the weights by group; None where a checkpoint of an earlier version lacks them."""

    @classmethod
    def of(cls, groups: Sequence[Mapping[str, Any]], names: Sequence[str] | None) -> "_Groups":
        """Groups of an optimizer's state, with the names of its weights in order."""
        sizes = [len(group["params"]) for group in groups]
        ends = list(accumulate(sizes))
        by_group = [list(names[end - size : end]) for size, end in zip(sizes, ends, strict=True)] if names else None
        return cls(list(dict.fromkeys(group.get(PATTERN) for group in groups)), sizes, by_group)

    def differ(self, saved: "_Groups") -> bool:
        """Whether the saved optimizer groups the same weights otherwise, or in another order.

        A pipeline stage has some of the weights, and takes its part of the saved groups by their names.
        """
        if self.names is None or saved.names is None:
            return self.sizes != saved.sizes and sum(self.sizes) == sum(saved.sizes)
        own = {name for group in self.names for name in group}
        parts = [[name for name in group if name in own] for group in saved.names]
        return sum(map(len, parts)) == len(own) and [part for part in parts if part] != self.names

    def describe(self) -> str:
        """Text with the patterns, and the numbers of weights."""
        named = ", ".join(repr(pattern) for pattern in self.patterns if pattern is not None)
        return f"groups of {self.sizes} weights" + (f" (lr_factors {named})" if named else " (no lr_factors)")


def _complete_average(checkpoint: Checkpoint, frozen: dict[str, Tensor]) -> None:
    """Add the frozen weights to those of a checkpoint of ``WeightAveraging``, which loads all of a model or nothing."""
    if TRAINED in checkpoint:
        checkpoint |= {name: frozen | checkpoint[name] for name in ("state_dict", TRAINED)}
