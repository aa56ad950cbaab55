"""Switching between the two sets of weights of schedule-free optimizers: training weights and averaged weights.

Gradients are computed at one set, and the result of training is the average of another (Defazio et al. 2024,
arXiv:2405.15682). Such an optimizer has ``train()`` and ``eval()``, which convert the module's weights from one set to
the other.
"""

import torch
from lightning.pytorch import LightningModule
from lit_callbacks.protocols import KeepsTwoWeightSets
from torch import Tensor

from lit_ft.protocols import Checkpoint

_KEY = "training_weights"


class ScheduleFreeModule(LightningModule):
    """LightningModule that holds the training weights during training, and the averaged weights everywhere else.

    Validation, ``on_train_end`` (export) and the ``state_dict`` of a checkpoint use the averaged weights. Converting
    weights and back rounds them, so a copy of the training weights is kept meanwhile, also in the checkpoint: results
    are bit-identical however often a run is validated, saved or resumed. With any other optimizer nothing happens.
    """

    def __init__(self) -> None:
        super().__init__()
        self._aside: dict[str, Tensor] = {}
        """Copy of the training weights by name, while the module holds the averaged weights."""

    def _schedule_free(self) -> list[KeepsTwoWeightSets]:
        return [o for o in self.trainer.optimizers if isinstance(o, KeepsTwoWeightSets)]

    def _put_average(self) -> None:
        if self._aside or not (optimizers := self._schedule_free()):
            return
        self._aside = {n: p.detach().clone() for n, p in self.named_parameters() if p.requires_grad}
        for optimizer in optimizers:
            optimizer.eval()

    @torch.no_grad()
    def _put_training_weights(self) -> None:
        for optimizer in self._schedule_free():
            optimizer.train()
        if self._aside:
            weights = dict(self.named_parameters())
            for name, tensor in self._aside.items():
                weights[name].copy_(tensor)
            self._aside = {}

    def setup(self, stage: str) -> None:
        """Start from the module's current weights, not from a copy of an earlier fit."""
        super().setup(stage)
        self._aside = {}

    def on_train_batch_start(self, batch: object, batch_idx: int) -> None:
        """Switch to the training weights, also after a resumption."""
        self._put_training_weights()

    def on_validation_model_eval(self) -> None:
        """Switch to the averaged weights for validation."""
        super().on_validation_model_eval()
        self._put_average()

    def on_train_epoch_end(self) -> None:
        """Switch to the averaged weights for what follows training; a further epoch switches back."""
        self._put_average()

    def on_save_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Save the averaged weights as the model's weights, and the training weights under a key of their own."""
        if not self._schedule_free():
            return
        is_training = not self._aside
        self._put_average()
        weights = dict(self.named_parameters(remove_duplicate=False))
        checkpoint["state_dict"] |= {n: p.detach().clone() for n, p in weights.items() if p.requires_grad}
        checkpoint[_KEY] = self._aside
        if is_training:
            self._put_training_weights()

    def on_load_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Load the training weights, to which the first batch switches."""
        self._aside = checkpoint.get(_KEY, {})
