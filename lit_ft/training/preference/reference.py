"""Log-probabilities of pairs by the model as it was before training, which some objectives compare it with.

They are computed once, before the first optimizer step, and kept in checkpoints: no second model is in memory, a step
has one forward pass, and each strategy computes them as it computes a validation.
"""

import time

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lit_callbacks.distributed.all_reduce import all_reduce
from lit_callbacks.evaluation.evaluation_side_effects import evaluating
from lit_callbacks.output.quantities import as_count, as_time
from torch import Tensor

from lit_ft.errors import RecipeError
from lit_ft.protocols import GivesPairs, PairSet
from lit_ft.training.preference.pairs import answer_log_probs, with_reference

SECONDS_BETWEEN_LINES = 30
_UNKNOWN = -torch.inf


class ReferenceLogProbs:
    """Log-probabilities of the chosen and rejected answers of sets of pairs, by the fingerprint of each set."""

    def __init__(self) -> None:
        self.known: dict[str, Tensor] = {}
        """``(pairs of the set, 2)``, fp32, on the CPU; -inf for pairs that the run has no use for."""
        self.is_of_start = True
        """Whether the module's weights are those from before training."""
        self._in_use: dict[str, Tensor] = {}

    def begin(self) -> None:
        """Prepare for another run, whose data and limits may differ."""
        self._in_use = {}

    def of(self, split: str, pairs: Tensor) -> Tensor:
        """Log-probabilities of pairs of a split that is prepared, by their indices ``(P,)``: ``(P, 2)``."""
        return self._in_use[split][pairs]

    def prepare(self, trainer: Trainer, module: LightningModule, data: GivesPairs, split: str) -> None:
        """Compute those that a split's batches need, unless they are known or there is no split.

        All ranks call it, once or more in a run.

        Raises:
            RecipeError: some are not known, and the weights are no longer those from before training.
        """
        if split in self._in_use or (pairs := data.pairs(split)) is None:
            return
        known = self.known.get(pairs.fingerprint, torch.full((pairs.total, 2), _UNKNOWN))
        if missing := int(torch.isinf(known[pairs.indices, 0]).sum()):
            if not self.is_of_start:
                raise RecipeError(_not_known(split, missing, len(pairs.indices)))
            known = torch.maximum(known, _compute(trainer, module, pairs))
            self.known[pairs.fingerprint] = known
        self._in_use[split] = known.to(trainer.strategy.root_device)


def _not_known(split: str, missing: int, of: int) -> str:
    fix = (
        "they are computed as a run begins, of the pairs that it trains and validates on; give it these pairs too "
        "(data.val_path), or take the data of that run"
    )
    if split == "train" and missing < of:
        fix = (
            "the run was begun with fewer optimizer steps (trainer.max_steps, trainer.max_epochs), which needed no "
            "more of them; begin a new run with as many steps as it is to have"
        )
    return (
        f"model.objective: log-probabilities of {missing:,} of {as_count(of, 'pair')} ({split}) by the model as it was "
        f"before training are not known, and the weights are trained now: {fix}"
    )


def _compute(trainer: Trainer, module: LightningModule, pairs: PairSet) -> Tensor:
    total, device = as_count(len(pairs.indices), "pair"), trainer.strategy.root_device
    rank_zero_info(f"reference: log-probabilities of {total} by the model as it is before training ...")
    began = said_at = time.monotonic()
    values, indices = torch.full((pairs.total, 2), _UNKNOWN, device=device), pairs.indices.to(device)
    with evaluating(trainer, module):
        for number, batch in enumerate(pairs.loader, 1):
            if not batch["segment_lengths"]:
                continue
            batch = with_reference(trainer.strategy.batch_to_device(batch))
            answers = answer_log_probs(module(batch).per_token, batch)
            values[indices[batch["pairs"]]] = torch.stack([answer.policy for answer in answers], dim=1)
            if time.monotonic() - said_at > SECONDS_BETWEEN_LINES:
                said_at = time.monotonic()
                left = as_time((said_at - began) * (pairs.batches / number - 1))
                rank_zero_info(f"reference: batch {number:,} of {pairs.batches:,}, {left} left")
    known = all_reduce(trainer, values, "max").cpu()
    rank_zero_info(f"reference: {total} in {as_time(time.monotonic() - began)}")
    return known
