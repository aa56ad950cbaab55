"""Metrics of preference tuning, means over pairs and over answers."""

from collections.abc import Collection
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
_OF_CHOSEN, _OF_REJECTED = ("reward_chosen", "log_prob_chosen"), ("reward_rejected", "log_prob_rejected")


class PairMetrics(StageMetrics):
    """Mean loss over the pairs of a stage, and means of what ``measured`` names.

    ``reward_accuracy`` is the share of pairs whose chosen answer has the higher reward, ``reward_margin`` how much
    higher it is; ``log_prob_*`` are log-probabilities of whole answers. Where answers are unpaired, a missing one has
    the reward of the divergence; means over chosen or rejected answers are left out of a step that has none. ``kl`` is
    the divergence, where the objective needs it.
    """

    shown = ("reward_accuracy", "reward_margin")

    def __init__(self, objective: Objective, has_router_loss: bool = False, measured: Collection[str] = NAMES) -> None:
        super().__init__(has_router_loss)
        self.objective, self.measured = objective, measured
        self.means = TokenMean((2 + len(_OF_CHOSEN + _OF_REJECTED),))
        self._answers: set[int] = set()
        """Whether there are chosen answers (0) and rejected ones (1), on any rank."""

    def _add_further(
        self, result: TokenLoss, batch: PackedBatch
    ) -> tuple[Tensor, Literal["target_sources", "pair_sources"]]:
        chosen, rejected = answer_log_probs(result.per_token, batch)
        rewards = self.objective.reward(chosen), self.objective.reward(rejected)
        is_right, is_there = rewards[0] > rewards[1], torch.ones_like(rewards[0])
        answers = zip((chosen, rejected), rewards, strict=True)
        measured = [(is_right, is_there), (chosen.divergence, is_there)]
        measured += [(part, answer.tokens > 0) for answer, reward in answers for part in (reward, answer.policy)]
        sums = [(values * counted).sum() for values, counted in measured]
        self.means.update(torch.stack(sums), torch.stack([counted.sum() for _, counted in measured]).long())
        self._answers.update(batch["window_answers"])
        return self.objective.losses(chosen, rejected), "pair_sources"

    def _further_means(self, loss: Tensor) -> dict[str, Tensor]:
        accuracy, divergence, *of_answers = self.means.compute().unbind()
        found = {"reward_accuracy": accuracy, **({"kl": divergence} if self.objective.needs_divergence else {})}
        every = dict(zip(_OF_CHOSEN + _OF_REJECTED, of_answers, strict=True))
        for number, names in enumerate((_OF_CHOSEN, _OF_REJECTED)):
            found |= {name: every[name] for name in names if number in self._answers and name in self.measured}
        if len(self._answers) == 2:
            found["reward_margin"] = every["reward_chosen"] - every["reward_rejected"]
        self._answers = set()
        return found
