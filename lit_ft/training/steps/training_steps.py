"""Training: the part of a micro-batch in its step's loss, and what is logged of a step.

One rule holds everywhere: the loss of an optimizer step is the mean over the supervised tokens of all its micro-batches
and ranks (``token_window.loss_weight``).
"""

from collections.abc import Callable, Mapping

import torch
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel

from lit_ft import process
from lit_ft.internals.lightning import end_epoch_that_is_over
from lit_ft.packed_batch import PackedBatch, TokenLoss, terms_in_batch
from lit_ft.protocols import Checkpoint
from lit_ft.training.loss.packed_forward import PackedForward
from lit_ft.training.loss.token_cross_entropy import LossOf
from lit_ft.training.loss.token_window import TokenWindow
from lit_ft.training.metrics import BarMetrics, StageMetrics
from lit_ft.training.steps.given_weights import GivenWeightsModule
from lit_ft.training.steps.guarded_steps import GuardedStepsModule
from lit_ft.training.steps.repeated_samples import warn_of_repeated_samples
from lit_ft.tuning import method_hooks


class TrainingStepsModule(GivenWeightsModule, GuardedStepsModule):
    """LightningModule whose forward pass returns the loss of a packed batch, of which a step takes its part."""

    model: PreTrainedModel | PeftModel | None
    train_metrics: StageMetrics
    _packed: PackedForward

    def __init__(self) -> None:
        super().__init__()
        self.record_losses: Callable[..., None] | None = None
        """Takes ids, tokens' losses, tokens and sources of a batch's samples; ``lit_callbacks.LossLedger``'s."""
        self._window, self._bar_metrics = TokenWindow(), BarMetrics()

    def on_train_start(self) -> None:
        """Name samples that count twice in an epoch; train no more of an epoch that was over before a resumption."""
        super().on_train_start()
        end_epoch_that_is_over(self.trainer)
        warn_of_repeated_samples(self.trainer.train_dataloader, "training")

    def training_step(self, batch: PackedBatch | Mapping[str, Tensor], batch_idx: int) -> Tensor:
        """Part of the step's token-mean loss; the batch is packed, or padded in Hugging Face's convention."""
        packed, accumulate = self._packed.as_packed_batch(batch), self.trainer.accumulate_grad_batches
        self._window.enter(self.trainer, packed, batch_idx)
        if packed["input_ids"].numel() == 0:
            loss = torch.zeros((), device=self.device, requires_grad=True)
        else:
            process.seed_micro_batch(self.trainer, batch_idx)
            weight = self._window.weight(self.trainer)
            result = self(PackedBatch(**packed, loss_weight=weight))
            self.train_metrics.add(result, packed)
            if self.record_losses is not None and "sample_ids" in packed and process.leads_replica(self.trainer):
                self._record(self.record_losses, result, packed)
            loss_sum = result.loss_sum + self._packed.take_router_loss(terms_in_batch(packed), self.train_metrics)
            loss = loss_sum * weight
        if batch_idx % accumulate == 0 and (term := method_hooks.regularization(self.model)) is not None:
            loss = loss + accumulate * term  # once in an optimizer step, over whose micro-batches Lightning averages
            self.log("train/regularization", term)
        if (batch_idx + 1) % accumulate == 0 or self.trainer.is_last_batch:
            self._log_step()
        return loss

    def _initial_loss(self, batch: PackedBatch) -> LossOf | None:
        """Loss of a batch, for inits that look at gradients; None is the sum of the tokens' cross-entropy."""
        return None

    def _record(self, record: Callable[..., None], result: TokenLoss, batch: PackedBatch) -> None:
        of_samples = batch["sample_targets"], batch["sample_sources"]
        record(batch["sample_ids"], result.per_token, *of_samples, per_token=True)

    def on_load_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Count the tokens of the step that goes on anew."""
        super().on_load_checkpoint(checkpoint)
        self._window = TokenWindow()

    def _log_step(self) -> None:
        loss = self.train_metrics.log(self, "train")
        # A number would be copied to the device, for which the host waits.
        rate = torch.as_tensor(self.trainer.optimizers[0].param_groups[0]["lr"], dtype=torch.float32)
        self.log("train/learning_rate", rate)
        shown = {"train/loss": loss, **self.train_metrics.on_bar, "train/learning_rate": rate}
        self._bar_metrics.show(self.trainer, shown)
        if (padding := self._packed.take_padding_share()) is not None:
            self.log("train/padding_share", torch.tensor(padding))
        self._finite.watch(self.trainer, "train/loss", self._window.mean(loss))
