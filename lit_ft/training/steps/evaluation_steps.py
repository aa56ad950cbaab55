"""Validation and test: means over the supervised tokens of the whole set."""

from collections.abc import Mapping

from lightning.pytorch import LightningModule
from torch import Tensor

from lit_ft.packed_batch import PackedBatch, as_packed_batch
from lit_ft.training.metrics import StageMetrics


class EvaluationStepsModule(LightningModule):
    """LightningModule whose forward pass returns the loss of a packed batch; logs its means for each set."""

    def __init__(self) -> None:
        super().__init__()
        self.val_metrics, self.test_metrics = StageMetrics(), StageMetrics()

    def validation_step(self, batch: PackedBatch | Mapping[str, Tensor], batch_idx: int) -> None:
        """Count the batch into val/loss, val/perplexity and val/token_accuracy."""
        packed = as_packed_batch(batch)
        self.val_metrics.add(self(packed), packed)

    def test_step(self, batch: PackedBatch | Mapping[str, Tensor], batch_idx: int) -> None:
        """Count the batch into test/loss, test/perplexity and test/token_accuracy."""
        packed = as_packed_batch(batch)
        self.test_metrics.add(self(packed), packed)

    def on_validation_epoch_end(self) -> None:
        """Log the means over the validation set."""
        self.val_metrics.log(self, "val", prog_bar=True)

    def on_test_epoch_end(self) -> None:
        """Log the means over the test set."""
        self.test_metrics.log(self, "test")
