"""Objectives of preference tuning: the loss of a pair of answers, from their log-probabilities.

Legend: P pairs of a batch. A loss is in nats. Rewards are what an objective lets the model tell apart answers by.
"""

import math
from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from lit_ft.errors import RecipeError, check_types
from lit_ft.training.loss.token_weights import with_options
from lit_ft.training.trial import Trial


class AnswerLogProbs(NamedTuple):
    """Log-probabilities of one answer of each pair."""

    policy: Tensor
    """``(P,)``, fp32: sum over the answer's supervised tokens, by the model that trains; of a missing answer
    ``divergence``."""
    reference: Tensor
    """``(P,)``, fp32: the same by the model as it was before training; of a missing answer 0."""
    tokens: Tensor
    """``(P,)``, fp32: number of supervised tokens of the answer; 0 where it is missing."""
    divergence: Tensor
    """``(P,)``, fp32: estimate of the Kullback-Leibler divergence of the model from what it was before training, the
    same for all pairs of an optimizer step; 0 where the objective does not need it."""

    @property
    def ratio(self) -> Tensor:
        """Logarithm of how much more probable the answer has become, ``(P,)``."""
        return self.policy - self.reference

    @property
    def mean(self) -> Tensor:
        """Mean log-probability of the answer's tokens, ``(P,)``."""
        return self.policy / self.tokens


class Objective(ABC):
    """Loss of pairs of a better and a worse answer to the same prompt."""

    needs_reference: ClassVar[bool]
    """Whether it compares the model with what it was before training."""
    needs_divergence: ClassVar[bool] = False
    """Whether it reads ``divergence``, for which each step has a further forward pass; it then needs the reference."""
    takes_unpaired: ClassVar[bool] = False
    """Whether it also has a loss of a pair of which one answer is missing."""

    @abstractmethod
    def losses(self, chosen: AnswerLogProbs, rejected: AnswerLogProbs) -> Tensor:
        """Loss of each pair, ``(P,)``."""

    @abstractmethod
    def reward(self, answer: AnswerLogProbs) -> Tensor:
        """Reward of each answer, ``(P,)``: the loss falls as that of the better one rises above that of the worse."""

    def __repr__(self) -> str:
        """Name and options, e.g. ``DPO(beta=0.1, label_smoothing=0, nll_weight=0)``."""
        return with_options(self)


class DPO(Objective):
    """Direct preference optimization (Rafailov et al. 2023, arXiv:2305.18290, equation 7)."""

    needs_reference = True

    def __init__(self, beta: float = 0.1, label_smoothing: float = 0.0, nll_weight: float = 0.0) -> None:
        """Set the loss.

        Args:
            beta: strength of the pull to the reference; a larger one changes the model less.
            label_smoothing: probability that the answers of a pair are mixed up, 0 to 0.5 (conservative DPO, Mitchell
                2023).
            nll_weight: weight of the mean cross-entropy of the better answer's tokens, which is added so that its own
                probability does not fall (Pang et al. 2024, arXiv:2404.19733, equation 4); 0 leaves it out.
        """
        check_types("model.objective", DPO.__init__, locals())
        _check_positive(beta=beta)
        if not 0 <= label_smoothing < 0.5:
            raise RecipeError(f"DPO: label_smoothing={label_smoothing} must be at least 0 and below 0.5")
        if not 0 <= nll_weight < math.inf:
            raise RecipeError(f"DPO: nll_weight={nll_weight} must be 0 or above, and finite")
        self.beta, self.label_smoothing, self.nll_weight = beta, label_smoothing, nll_weight

    def losses(self, chosen: AnswerLogProbs, rejected: AnswerLogProbs) -> Tensor:
        """Loss of each pair, ``(P,)``."""
        margin, mixed_up = self.beta * (chosen.ratio - rejected.ratio), self.label_smoothing
        losses = -(1 - mixed_up) * logsigmoid(margin) - mixed_up * logsigmoid(-margin)
        return losses - self.nll_weight * chosen.mean if self.nll_weight else losses

    def reward(self, answer: AnswerLogProbs) -> Tensor:
        """``beta`` times the log-ratio to the reference, ``(P,)``."""
        return self.beta * answer.ratio


class IPO(Objective):
    """Identity preference optimization (Azar et al. 2023, arXiv:2310.12036, equation 17): a bounded margin.

    As in TRL, log-ratios are means over an answer's tokens, so that the margin does not depend on lengths.
    """

    needs_reference = True

    def __init__(self, tau: float = 0.1) -> None:
        """Set the loss.

        Args:
            tau: strength of the pull to the reference; the margin is pulled to 1 / (2 tau).
        """
        check_types("model.objective", IPO.__init__, locals())
        _check_positive(tau=tau)
        self.tau = tau

    def losses(self, chosen: AnswerLogProbs, rejected: AnswerLogProbs) -> Tensor:
        """Loss of each pair, ``(P,)``."""
        margin = chosen.ratio / chosen.tokens - rejected.ratio / rejected.tokens
        return (margin - 1 / (2 * self.tau)) ** 2

    def reward(self, answer: AnswerLogProbs) -> Tensor:
        """``tau`` times the mean log-ratio to the reference, ``(P,)``."""
        return self.tau * answer.ratio / answer.tokens


class SimPO(Objective):
    """Simple preference optimization (Meng et al. 2024, arXiv:2405.14734, equation 6): without a reference."""

    needs_reference = False

    def __init__(self, beta: float = 2.0, gamma: float = 1.0) -> None:
        """Set the loss.

        Args:
            beta: factor on the mean log-probability of an answer's tokens.
            gamma: margin by which the better answer's reward is to be above the worse one's.
        """
        check_types("model.objective", SimPO.__init__, locals())
        _check_positive(beta=beta)
        if not 0 <= gamma < math.inf:
            raise RecipeError(f"SimPO: gamma={gamma} must be 0 or above, and finite")
        self.beta, self.gamma = beta, gamma

    def losses(self, chosen: AnswerLogProbs, rejected: AnswerLogProbs) -> Tensor:
        """Loss of each pair, ``(P,)``."""
        return -logsigmoid(self.reward(chosen) - self.reward(rejected) - self.gamma)

    def reward(self, answer: AnswerLogProbs) -> Tensor:
        """``beta`` times the mean log-probability of the answer's tokens, ``(P,)``."""
        return self.beta * answer.mean


class ORPO(Objective):
    """Odds ratio preference optimization (Hong et al. 2024, arXiv:2403.07691, equation 6): without a reference.

    The mean cross-entropy of the better answer's tokens, and the log odds ratio of both answers.
    """

    needs_reference = False

    def __init__(self, beta: float = 0.1) -> None:
        """Set the loss.

        Args:
            beta: weight of the odds ratio's loss, which the paper calls lambda.
        """
        check_types("model.objective", ORPO.__init__, locals())
        _check_positive(beta=beta)
        self.beta = beta

    def losses(self, chosen: AnswerLogProbs, rejected: AnswerLogProbs) -> Tensor:
        """Loss of each pair, ``(P,)``."""
        return -chosen.mean - self.beta * logsigmoid(_log_odds(chosen.mean) - _log_odds(rejected.mean))

    def reward(self, answer: AnswerLogProbs) -> Tensor:
        """``beta`` times the mean log-probability of the answer's tokens, ``(P,)``."""
        return self.beta * answer.mean


class KTO(Objective):
    """Kahneman-Tversky optimization (Ethayarajh et al. 2024, arXiv:2402.01306, equation 8): answers judged one by one.

    A good answer is to become more probable than the divergence says of any, a bad one less. The loss of a pair is the
    mean over its answers.
    """

    needs_reference = True
    needs_divergence = True
    takes_unpaired = True

    def __init__(self, beta: float = 0.1, desirable_weight: float = 1.0, undesirable_weight: float = 1.0) -> None:
        """Set the loss.

        Args:
            beta: strength of the pull to the reference; a larger one changes the model less.
            desirable_weight: weight of good answers. The paper advises weights that let both kinds count alike: number
                of good answers times their weight between 1 and 4/3 of the same of bad ones.
            undesirable_weight: weight of bad answers.
        """
        check_types("model.objective", KTO.__init__, locals())
        _check_positive(beta=beta, desirable_weight=desirable_weight, undesirable_weight=undesirable_weight)
        self.beta, self.desirable_weight, self.undesirable_weight = beta, desirable_weight, undesirable_weight

    def losses(self, chosen: AnswerLogProbs, rejected: AnswerLogProbs) -> Tensor:
        """Loss of each pair, ``(P,)``."""
        is_good, is_bad = ((answer.tokens > 0).to(answer.policy.dtype) for answer in (chosen, rejected))
        of_good = self.desirable_weight * torch.sigmoid(self.beta * (chosen.divergence - chosen.ratio))
        of_bad = self.undesirable_weight * torch.sigmoid(self.beta * (rejected.ratio - rejected.divergence))
        return (is_good * of_good + is_bad * of_bad) / (is_good + is_bad)

    def reward(self, answer: AnswerLogProbs) -> Tensor:
        """``beta`` times the log-ratio to the reference, ``(P,)``."""
        return self.beta * answer.ratio


def check_objective(objective: Objective) -> None:
    """Try an objective on three pairs, so that one that a user has written fails before the long work starts.

    Raises:
        RecipeError: it does not say whether it needs a reference, or has no loss with a gradient for each pair alone.
    """
    trial, pairs = Trial("model.objective", objective), 3
    if not isinstance(getattr(objective, "needs_reference", None), bool):
        raise RecipeError(
            f"model.objective: {trial.name} has no needs_reference; set it to True or False in the class: whether it "
            "compares the model with what it was before training"
        )
    policy = torch.tensor([-1.0, -2.0, -4.0], requires_grad=True)
    zeros, four = torch.zeros(pairs), torch.full((pairs,), 4.0)
    chosen, rejected = (AnswerLogProbs(k * policy, zeros, four, zeros) for k in (1, 2))
    with torch.enable_grad():
        losses = trial.numbers("losses", lambda: objective.losses(chosen, rejected), (pairs,), f"{pairs} pairs")
    trial.numbers("reward", lambda: objective.reward(chosen), (pairs,), f"{pairs} answers")
    if not losses.requires_grad:
        raise RecipeError(f"model.objective: {trial.name}.losses has no gradient; compute it from the answers' policy")
    one_by_one = [(_pair(chosen, i), _pair(rejected, i)) for i in range(pairs)]
    fix = "compute the loss of a pair from it alone, because the size of micro-batches must not change what is trained"
    each = lambda: [objective.losses(*both) for both in one_by_one]  # noqa: E731
    trial.check_alone("losses", losses, each, f"{pairs} pairs", fix)


def _pair(answers: AnswerLogProbs, index: int) -> AnswerLogProbs:
    return AnswerLogProbs(*(part[index : index + 1] for part in answers))


def _log_odds(log_probability: Tensor) -> Tensor:
    # log(p / (1 - p)); an answer that is certain has p = 1 in fp32, whose odds are infinite.
    below_one = log_probability.clamp(max=-torch.finfo(log_probability.dtype).eps)
    return below_one - torch.log(-torch.expm1(below_one))


def _check_positive(**options: float) -> None:
    for name, value in options.items():
        if not 0 < value < math.inf:
            raise RecipeError(f"model.objective: {name}={value} must be above 0 and finite")
