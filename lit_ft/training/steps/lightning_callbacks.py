"""Lightning's callbacks that change what is trained: which are refused, and averages that leave the base alone."""

from collections.abc import Callable, Iterable, Sequence

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    GradientAccumulationScheduler,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lit_callbacks.internals.lightning_internals import attributes_of
from lit_callbacks.protocols import KeepsTwoWeightSets
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_swa_avg_fn

from lit_ft.errors import RecipeError
from lit_ft.internals.lightning import TRAINED, average_of
from lit_ft.protocols import Checkpoint
from lit_ft.training.steps.lightning_strategies import check_lightning_strategy

_REFUSED: dict[type[Callback], str] = {
    BaseFinetuning: "freezes parts of a model that is not there yet; name the weights that train by model.trainable, "
    "or train an adapter with model.peft",
    BatchSizeFinder: "trains steps that the run then lacks, and the recipe would not say with which batch size it ran; "
    "set data.micro_batch_size, and see the memory that it takes: python -m lit_ft plan --config RECIPE",
    ModelPruning: "prunes a model that is not there yet; prune the merged model, with torch.nn.utils.prune",
    StochasticWeightAveraging: "copies a model that is not there yet, and would average nothing; take "
    "lightning.pytorch.callbacks.EMAWeightAveraging, which can start at an epoch (update_starting_at_epoch)",
}


class LightningCallbacksModule(LightningModule):
    """LightningModule that refuses what would do nothing, and whose frozen weights averages leave as they are."""

    def __init__(self) -> None:
        super().__init__()
        self._holds_average = False
        """Whether ``WeightAveraging`` has exchanged weights and average, for a validation."""

    def configure_callbacks(self) -> Sequence[Callback] | Callback:
        """Check the trainer's strategy and callbacks before these are set up, which may end in errors of their own.

        Raises:
            RecipeError: a callback would do nothing, or the strategy trains something else.
        """
        if self.trainer.state.fn == TrainerFn.FITTING:
            check_lightning_strategy(type(self.trainer.strategy))
            check_lightning_callbacks(attributes_of(self.trainer).callbacks, self.trainer.strategy)
        return super().configure_callbacks()

    def setup(self, stage: str) -> None:
        """Check the trainer's strategy and callbacks, and let averages of weights leave the frozen base as it is.

        Raises:
            RecipeError: a callback would do nothing, or the strategy trains something else.
        """
        super().setup(stage)
        self._holds_average = False
        callbacks = attributes_of(self.trainer).callbacks
        if stage == "fit":  # again: a subclass may have added callbacks
            check_lightning_strategy(type(self.trainer.strategy))
            check_lightning_callbacks(callbacks, self.trainer.strategy)
        for callback in callbacks:  # they are set up by now
            if isinstance(callback, WeightAveraging) and (average := average_of(callback)) is not None:
                average_what_differs(average)

    def on_fit_start(self) -> None:
        """Refuse a second average beside an optimizer's own.

        Raises:
            RecipeError: there is one.
        """
        super().on_fit_start()
        check_average(attributes_of(self.trainer).callbacks, self.trainer.optimizers)

    def on_validation_epoch_start(self) -> None:
        """Note that callbacks have exchanged weights and average."""
        super().on_validation_epoch_start()
        self._holds_average = True

    def on_validation_epoch_end(self) -> None:
        """Note that callbacks have exchanged them back."""
        super().on_validation_epoch_end()
        self._holds_average = False

    def on_save_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Put weights and average where they belong, in a checkpoint that an exception within a validation writes."""
        super().on_save_checkpoint(checkpoint)
        if self._holds_average and TRAINED in checkpoint:
            checkpoint |= {TRAINED: checkpoint["state_dict"], "state_dict": checkpoint[TRAINED]}


def check_lightning_callbacks(callbacks: Iterable[Callback], strategy: Strategy) -> None:
    """Refuse callbacks of Lightning that would do nothing, or not what they are for.

    Raises:
        RecipeError: there is one.
    """
    for callback in callbacks:
        name = type(callback).__name__
        for kind, why in _REFUSED.items():
            if isinstance(callback, kind):
                raise RecipeError(f"trainer.callbacks: {name} {why}")
        if isinstance(callback, WeightAveraging) and type(strategy) not in (SingleDeviceStrategy, DDPStrategy):
            raise RecipeError(
                f"trainer.callbacks: {name} averages weights that each rank holds in full, on one device or with DDP, "
                f"and not under {type(strategy).__name__}; remove it, or set trainer.strategy: ddp"
            )


def check_accumulation(callbacks: Iterable[Callback], accumulate: int, strategy: Strategy) -> None:
    """Refuse a ``GradientAccumulationScheduler`` beside another one or a fixed number, and under DeepSpeed.

    Args:
        callbacks: callbacks of the recipe.
        accumulate: ``trainer.accumulate_grad_batches``.
        strategy: strategy of the trainer.

    Raises:
        RecipeError: there is one.
    """
    schedulers = [one for one in callbacks if isinstance(one, GradientAccumulationScheduler)]
    if not schedulers:
        return
    what = "trainer.callbacks: GradientAccumulationScheduler says how many micro-batches an optimizer step has"
    if accumulate != 1:
        raise RecipeError(f"{what}, and so does trainer.accumulate_grad_batches={accumulate}; leave one of them out")
    if len(schedulers) > 1:
        raise RecipeError(
            f"{what}, and there are {len(schedulers)} of them; leave one, with all epochs in its scheduling"
        )
    if isinstance(strategy, DeepSpeedStrategy):
        raise RecipeError(
            f"{what}, which DeepSpeed takes once for the run; give trainer.accumulate_grad_batches in its place"
        )


def check_average(callbacks: Iterable[Callback], optimizers: Iterable[Optimizer]) -> None:
    """Refuse an average of the training weights of an optimizer whose result is an average of its own.

    Raises:
        RecipeError: there are both.
    """
    own = next((one for one in optimizers if isinstance(one, KeepsTwoWeightSets)), None)
    average = next((one for one in callbacks if isinstance(one, WeightAveraging)), None)
    if own is not None and average is not None:
        raise RecipeError(
            f"trainer.callbacks: {type(average).__name__} would replace the average that {type(own).__name__} makes, "
            "which is what it trains; leave one of them out"
        )


def average_what_differs(average: AveragedModel) -> None:
    """Let an average leave elements as they are that equal those of the model, as frozen weights do.

    The usual formula of EMA, ``decay * average + (1 - decay) * current``, rounds them; of a quantized base it
    changes the codes.
    """
    if average.multi_avg_fn is not None:
        return
    mean: Callable[[Tensor, Tensor, Tensor | int], Tensor] = average.avg_fn or get_swa_avg_fn()

    def mean_or_same(averaged: Tensor, current: Tensor, count: Tensor | int) -> Tensor:
        return torch.where(averaged == current, averaged, mean(averaged, current, count).to(averaged.dtype))

    average.avg_fn = mean_or_same
