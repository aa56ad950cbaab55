"""Log-probabilities of pairs by the model as it was before training, which some objectives compare it with.

They are computed once, before the first optimizer step, and kept in checkpoints: no second model is in memory, a step
has one forward pass, and each strategy computes them as it computes a validation.
"""

import time
from collections.abc import Iterable

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lit_callbacks.distributed.all_reduce import all_reduce
from lit_callbacks.evaluation.evaluation_side_effects import evaluating
from lit_callbacks.output.quantities import as_count, as_time
from lit_callbacks.widest_float import widest_float
from torch import Tensor

from lit_ft.errors import RecipeError
from lit_ft.packed_batch import PackedBatch
from lit_ft.protocols import GivesPairs, PairSet
from lit_ft.training.preference.pairs import answer_log_probs, mismatched_log_probs, with_reference

SECONDS_BETWEEN_LINES = 30
_UNKNOWN = -torch.inf


class ReferenceLogProbs:
    """Log-probabilities of the answers of sets of pairs, by the fingerprint of each set."""

    def __init__(self) -> None:
        self.known: dict[str, Tensor] = {}
        """``(pairs of the set, 2)``, fp32, on the CPU: of the chosen and the rejected answer; -inf for pairs that the
        run has no use for. Where the divergence is needed, a third column is of answers to other prompts."""
        self.is_of_start = True
        """Whether the module's weights are those from before training."""
        self._in_use: dict[str, Tensor] = {}

    def begin(self) -> None:
        """Prepare for another run, whose data and limits may differ."""
        self._in_use = {}

    def of(self, split: str, pairs: Tensor) -> Tensor:
        """Log-probabilities of pairs of a split that is prepared, by their indices ``(P,)``: ``(P, 2)``."""
        return self._in_use[split][pairs, :2]

    def divergence(
        self,
        trainer: Trainer,
        module: LightningModule,
        split: str,
        mismatched: Iterable[PackedBatch],
        indices: Tensor | None = None,
    ) -> Tensor:
        """Estimate of the Kullback-Leibler divergence of the model from the reference, in nats, a scalar, fp32.

        The mean log-ratio of whole answers to other prompts, on all ranks, or 0 if that is above (Ethayarajh et al.
        2024, arXiv:2402.01306, section 4.1); a collective.

        Args:
            trainer: trainer of the run.
            module: module in evaluation mode, without gradients.
            split: split that is prepared.
            mismatched: batches of ``window_mismatched`` on the device, equally many on all ranks.
            indices: index of each pair that the batches number among all of the split; None where they number those.
        """
        device = trainer.strategy.root_device
        # In fp64, so that the order in which ranks and micro-batches add does not count.
        wide = widest_float(device)
        summed = torch.zeros(2, dtype=wide, device=device)
        indices = None if indices is None else indices.to(device)
        for numbers, log_probs in mismatched_log_probs(module, mismatched):
            reference = self._in_use[split][numbers if indices is None else indices[numbers], 2]
            summed[0] += (log_probs - reference).sum(dtype=wide)
            summed[1] += len(numbers)
        ratio, count = all_reduce(trainer, summed, "sum")
        return (ratio / count).clamp(min=0).float()

    def prepare(
        self, trainer: Trainer, module: LightningModule, data: GivesPairs, split: str, needs_divergence: bool
    ) -> None:
        """Compute those that a split's batches need, unless they are known or there is no split.

        All ranks call it, once or more in a run.

        Raises:
            RecipeError: some are not known, and the weights are no longer those from before training.
        """
        if split in self._in_use or (pairs := data.pairs(split)) is None:
            return
        unknown = torch.full((pairs.total, 3 if needs_divergence else 2), _UNKNOWN)
        known = self.known.get(pairs.fingerprint, unknown)
        known = known if known.shape[1] >= unknown.shape[1] else unknown  # of an objective without divergence
        if missing := int(torch.isinf(known[pairs.indices, 0]).sum()):
            if not self.is_of_start:
                raise RecipeError(_not_known(split, missing, pairs))
            known = torch.maximum(known, _compute(trainer, module, pairs, known.shape[1]))
            self.known[pairs.fingerprint] = known
        self._in_use[split] = known.to(trainer.strategy.root_device)


def _not_known(split: str, missing: int, pairs: PairSet) -> str:
    fix = (
        "they are computed as a run begins, of the pairs that it trains and validates on; give it these pairs too "
        "(data.val_path), or take the data of that run"
    )
    if split == "train" and missing < len(pairs.indices):
        fix = (
            "the run was begun with fewer optimizer steps (trainer.max_steps, trainer.max_epochs), which needed no "
            "more of them; begin a new run with as many steps as it is to have"
        )
    return (
        f"model.objective: log-probabilities of {missing:,} of {as_count(len(pairs.indices), pairs.kind)} ({split}) by "
        f"the model as it was before training are not known, and the weights are trained now: {fix}"
    )


def _compute(trainer: Trainer, module: LightningModule, pairs: PairSet, columns: int) -> Tensor:
    total, device = as_count(len(pairs.indices), pairs.kind), trainer.strategy.root_device
    rank_zero_info(f"reference: log-probabilities of {total} by the model as it is before training ...")
    began = said_at = time.monotonic()
    values, indices = torch.full((pairs.total, columns), _UNKNOWN, device=device), pairs.indices.to(device)
    with evaluating(trainer, module):
        for number, batch in enumerate(pairs.loader, 1):
            if not batch["segment_lengths"]:
                continue
            batch = with_reference(trainer.strategy.batch_to_device(batch))
            answers = answer_log_probs(module(batch).per_token, batch)
            values[indices[batch["pairs"]], :2] = torch.stack([answer.policy for answer in answers], dim=1)
            for numbers, log_probs in mismatched_log_probs(module, batch.get("window_mismatched", ())):
                values[indices[numbers], 2] = log_probs
            if time.monotonic() - said_at > SECONDS_BETWEEN_LINES:
                said_at = time.monotonic()
                left = as_time((said_at - began) * (pairs.batches / number - 1))
                rank_zero_info(f"reference: batch {number:,} of {pairs.batches:,}, {left} left")
    known = all_reduce(trainer, values, "max").cpu()
    rank_zero_info(f"reference: {total} in {as_time(time.monotonic() - began)}")
    return known
