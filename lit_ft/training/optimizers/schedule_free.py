"""Two sets of weights, as schedule-free optimizers have them: which is in place when.

They take gradients at one set and answer with the average of another (Defazio et al. 2024, arXiv:2405.15682). Such
an optimizer has ``train()`` and ``eval()``, which turn the weights of the module from one set into the other.
"""

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import Optimizer

_KEY = "training_weights"


class ScheduleFreeModule(LightningModule):
    """Has the averaged weights in place wherever weights are used, and the training weights while it trains.

    Validation, ``on_train_end`` (export) and ``state_dict`` of a checkpoint see the averaged weights. Turning
    weights there and back rounds, so the training weights are kept aside meanwhile, in the checkpoint too: how often
    a run is validated, saved or resumed changes no bit of it. With any other optimizer nothing happens.
    """

    def __init__(self) -> None:
        """Start with the training weights in place."""
        super().__init__()
        self._aside: dict[str, Tensor] = {}
        """The training weights, by name, while the averaged ones are in place."""

    def _schedule_free(self) -> list[Optimizer]:
        return [o for o in self.trainer.optimizers if callable(getattr(o, "train", None))]

    def _put_average(self) -> None:
        if self._aside or not (optimizers := self._schedule_free()):
            return
        self._aside = {n: p.detach().clone() for n, p in self.named_parameters() if p.requires_grad}
        for optimizer in optimizers:
            optimizer.eval()  # type: ignore[attr-defined]

    @torch.no_grad()
    def _put_training_weights(self) -> None:
        for optimizer in self._schedule_free():
            optimizer.train()  # type: ignore[attr-defined]
        if self._aside:
            weights = dict(self.named_parameters())
            for name, tensor in self._aside.items():
                weights[name].copy_(tensor)
            self._aside = {}

    def setup(self, stage: str) -> None:
        """Start from the weights in place, not from those that an earlier fit kept aside."""
        super().setup(stage)
        self._aside = {}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Train at the training weights, wherever the run comes from."""
        self._put_training_weights()

    def on_validation_model_eval(self) -> None:
        """Validate the averaged weights."""
        super().on_validation_model_eval()
        self._put_average()

    def on_train_epoch_end(self) -> None:
        """Leave the averaged weights to what comes after training; another epoch puts the others back."""
        self._put_average()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the averaged weights as the model's, and the training weights beside them."""
        if not self._schedule_free():
            return
        is_training = not self._aside
        self._put_average()
        weights = dict(self.named_parameters(remove_duplicate=False))
        checkpoint["state_dict"] |= {n: p.detach().clone() for n, p in weights.items() if p.requires_grad}
        checkpoint[_KEY] = self._aside
        if is_training:
            self._put_training_weights()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the training weights for the first batch."""
        self._aside = checkpoint.get(_KEY, {})
