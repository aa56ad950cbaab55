"""Validation and test: means over the supervised tokens of the whole set."""

from collections.abc import Mapping, Sequence

from lightning.pytorch import LightningModule
from lit_callbacks.internals.lightning_internals import logged_step
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel

from lit_ft.errors import RecipeError
from lit_ft.internals.lightning import set_logged_steps
from lit_ft.packed_batch import PackedBatch
from lit_ft.training.loss.packed_forward import PackedForward
from lit_ft.training.metrics import StageMetrics
from lit_ft.training.steps.repeated_samples import warn_of_repeated_samples


class EvaluationStepsModule(LightningModule):
    """LightningModule whose forward pass returns the loss of a packed batch; logs its means for each set."""

    measured: Sequence[str] = ("perplexity", "token_accuracy")
    """What it measures of training, validation and test besides the loss."""
    model: PreTrainedModel | PeftModel | None
    _packed: PackedForward

    def __init__(self) -> None:
        super().__init__()
        self.val_metrics, self.test_metrics = StageMetrics(), StageMetrics()
        self._logged_step: int | None = None

    def packed(self, batch: PackedBatch | Mapping[str, Tensor]) -> PackedBatch:
        """Packed batch of a padded one, which has ``input_ids`` and ``labels``; a packed one is returned unchanged.

        Raises:
            RecipeError: it is no such batch, or the model is not built.
        """
        if self.model is None:
            raise RecipeError("the model has no weights yet: a Trainer reads them, or model.configure_model()")
        return self._packed.as_packed_batch(batch)

    def validation_step(self, batch: PackedBatch | Mapping[str, Tensor], batch_idx: int) -> None:
        """Count the batch into val/loss, val/perplexity and val/token_accuracy."""
        packed = self._packed.as_packed_batch(batch)
        self.val_metrics.add(self(packed), packed)

    def test_step(self, batch: PackedBatch | Mapping[str, Tensor], batch_idx: int) -> None:
        """Count the batch into test/loss, test/perplexity and test/token_accuracy."""
        packed = self._packed.as_packed_batch(batch)
        self.test_metrics.add(self(packed), packed)

    def on_validation_start(self) -> None:
        """Let a validation between the micro-batches of a step be logged at the step before, whose weights it sees."""
        super().on_validation_start()
        warn_of_repeated_samples(self.trainer.val_dataloaders, "validation")
        if not self.trainer.sanity_checking and self.trainer.global_step:
            self._logged_step = logged_step(self.trainer)
            set_logged_steps(self.trainer, self.trainer.global_step - 1)

    def on_validation_end(self) -> None:
        """Go on with Lightning's number of the step."""
        super().on_validation_end()
        if self._logged_step is not None:
            set_logged_steps(self.trainer, self._logged_step)
            self._logged_step = None

    def on_validation_epoch_end(self) -> None:
        """Log the means over the validation set."""
        super().on_validation_epoch_end()
        self.val_metrics.log(self, "val", prog_bar=True)

    def on_test_start(self) -> None:
        """Name samples that count twice."""
        super().on_test_start()
        warn_of_repeated_samples(self.trainer.test_dataloaders, "test")

    def on_test_epoch_end(self) -> None:
        """Log the means over the test set."""
        self.test_metrics.log(self, "test")
