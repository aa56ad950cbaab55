"""Algorithms of policy optimization: how rewards of answers become weights of their tokens in the loss.

Legend: P prompts, G answers to each. The answers come from the weights that the step trains, so that the gradient of
the policy's objective is that of the answers' cross-entropy, each token's times a constant: no ratio of old and new
probabilities, and nothing to clip.
"""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from lit_ft.errors import RecipeError, check_types
from lit_ft.training.loss.token_weights import with_options
from lit_ft.training.trial import Trial

EPSILON = 1e-4
"""What is added to a standard deviation that advantages are divided by, as in TRL."""


class Algorithm(ABC):
    """Advantages of answers over others to the same prompt, and how an answer's length counts."""

    counts_tokens: ClassVar[bool] = False
    """Whether a step's loss is the mean over the tokens of all its answers; else it is the mean over answers."""

    @abstractmethod
    def advantages(self, rewards: Tensor) -> Tensor:
        """Advantages of answers, ``(P, G)``, fp32, from their rewards, ``(P, G)``, fp32; those of each prompt alone."""

    @abstractmethod
    def token_weight(self, tokens: Tensor, max_new_tokens: int) -> Tensor:
        """Factor on the advantage of each token of an answer, ``(P, G)``, fp32.

        Args:
            tokens: numbers of tokens of the answers, ``(P, G)``, fp32.
            max_new_tokens: largest number of tokens of an answer.
        """

    def __repr__(self) -> str:
        """Name and options, e.g. ``GRPO(scale_rewards=True)``."""
        return with_options(self)


class GRPO(Algorithm):
    """Group relative policy optimization (Shao et al. 2024, arXiv:2402.03300, equation 3): means over each answer."""

    def __init__(self, scale_rewards: bool = True) -> None:
        """Set the loss.

        Args:
            scale_rewards: divide advantages by the standard deviation of the prompt's rewards; false leaves the
                difference to their mean.
        """
        check_types("model.algorithm", GRPO.__init__, locals())
        self.scale_rewards = scale_rewards

    def advantages(self, rewards: Tensor) -> Tensor:
        """Difference to the mean of the prompt's rewards, over their standard deviation, ``(P, G)``."""
        advantages = _centered(rewards)
        return advantages / (rewards.std(1, keepdim=True) + EPSILON) if self.scale_rewards else advantages

    def token_weight(self, tokens: Tensor, max_new_tokens: int) -> Tensor:
        """One over the number of the answer's tokens, ``(P, G)``."""
        return 1 / tokens


class DrGRPO(Algorithm):
    """GRPO without its bias to short right and long wrong answers (Liu et al. 2025, arXiv:2503.20783, section 3.2)."""

    def advantages(self, rewards: Tensor) -> Tensor:
        """Difference to the mean of the prompt's rewards, ``(P, G)``."""
        return _centered(rewards)

    def token_weight(self, tokens: Tensor, max_new_tokens: int) -> Tensor:
        """One over ``max_new_tokens``, whatever the length, ``(P, G)``."""
        return torch.full_like(tokens, 1 / max_new_tokens)


class DAPO(GRPO):
    """GRPO whose loss is the mean over the tokens of all answers (Yu et al. 2025, arXiv:2503.14476, section 3.3)."""

    counts_tokens = True

    def token_weight(self, tokens: Tensor, max_new_tokens: int) -> Tensor:
        """1, whatever the length, ``(P, G)``."""
        return torch.ones_like(tokens)


class RLOO(Algorithm):
    """REINFORCE with the mean of the other answers' rewards as baseline (Ahmadian et al. 2024, arXiv:2402.14740)."""

    def advantages(self, rewards: Tensor) -> Tensor:
        """Difference to the mean reward of the prompt's other answers, ``(P, G)``."""
        answers = rewards.shape[1]
        return _centered(rewards) * (answers / (answers - 1))

    def token_weight(self, tokens: Tensor, max_new_tokens: int) -> Tensor:
        """1: the log-probability of a whole answer counts, ``(P, G)``."""
        return torch.ones_like(tokens)


def _centered(rewards: Tensor) -> Tensor:
    # In fp64, where the mean of equal fp32 numbers is that number: their advantages are 0, and are not computed.
    wide = rewards.double()
    return (wide - wide.mean(1, keepdim=True)).float()


def check_algorithm(algorithm: Algorithm, answers: int) -> None:
    """Try an algorithm on two prompts, so that one that a user has written fails before the long work starts.

    Raises:
        RecipeError: it does not give one finite number for each answer, or those of a prompt depend on another's.
    """
    trial = Trial("model.algorithm", algorithm)
    rewards = torch.stack([torch.arange(answers) % 2, 1 + torch.arange(answers)]).float()
    tokens = 1 + torch.arange(2.0 * answers).view(2, answers)
    shape, of = (2, answers), f"{answers} answers to each of 2 prompts"
    advantages = trial.numbers("advantages", lambda: algorithm.advantages(rewards), shape, of)
    weights = trial.numbers("token_weight", lambda: algorithm.token_weight(tokens, 100), shape, of)
    for method, values in {"advantages": advantages, "token_weight": weights}.items():
        if not bool(values.isfinite().all()):
            raise RecipeError(
                f"model.algorithm: {trial.name}.{method} gives {values.tolist()} for {of}; return finite numbers"
            )
    fix = (
        "compute those of a prompt from its own rewards, because the size of micro-batches must not change what is "
        "trained"
    )
    each = lambda: [algorithm.advantages(of_prompt[None]) for of_prompt in rewards]  # noqa: E731
    trial.check_alone("advantages", advantages, each, of, fix)
