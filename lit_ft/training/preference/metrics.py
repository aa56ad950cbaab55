"""Metrics of preference tuning, means over pairs."""

from typing import Literal

import torch
from torch import Tensor

from lit_ft.packed_batch import PackedBatch, TokenLoss
from lit_ft.training.metrics import StageMetrics, TokenMean
from lit_ft.training.preference.objectives import Objective
from lit_ft.training.preference.pairs import answer_log_probs

NAMES = (
    "reward_accuracy",
    "reward_margin",
    "reward_chosen",
    "reward_rejected",
    "log_prob_chosen",
    "log_prob_rejected",
)


class PairMetrics(StageMetrics):
    """Mean loss over the pairs of a stage, and means of what ``NAMES`` has.

    ``reward_accuracy`` is the share of pairs whose chosen answer has the higher reward, ``reward_margin`` how much
    higher it is; ``log_prob_*`` are log-probabilities of whole answers.
    """

    shown = ("reward_accuracy", "reward_margin")

    def __init__(self, objective: Objective, has_router_loss: bool = False) -> None:
        super().__init__(has_router_loss)
        self.objective = objective
        self.means = TokenMean((len(NAMES),))

    def _add_further(
        self, result: TokenLoss, batch: PackedBatch
    ) -> tuple[Tensor, Literal["target_sources", "pair_sources"]]:
        chosen, rejected = answer_log_probs(result.per_token, batch)
        rewards = self.objective.reward(chosen), self.objective.reward(rejected)
        is_right, margin = (rewards[0] > rewards[1]).to(rewards[0].dtype), rewards[0] - rewards[1]
        measured = torch.stack([is_right, margin, *rewards, chosen.policy, rejected.policy])
        self.means.update(measured.sum(1), len(batch["pairs"]))
        return self.objective.losses(chosen, rejected), "pair_sources"

    def _further_means(self, loss: Tensor) -> dict[str, Tensor]:
        return dict(zip(NAMES, self.means.compute().unbind(), strict=True))
