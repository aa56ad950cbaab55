"""Algorithms of policy optimization: how rewards of answers become weights of their tokens in the loss.

Legend: P prompts, G answers to each. The answers come from the weights that the step trains, so that the gradient of
the policy's objective is that of the answers' cross-entropy, each token's times a constant: no ratio of old and new
probabilities, and nothing to clip.
"""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from lit_ft.errors import RecipeError, check_types, explained
from lit_ft.training.loss.token_weights import with_options

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
    name = type(algorithm).__name__
    rewards = torch.stack([torch.arange(answers) % 2, 1 + torch.arange(answers)]).float()
    tokens = 1 + torch.arange(2.0 * answers).view(2, answers)
    with explained("model.algorithm", f"fix {name}"):
        found = {"advantages": algorithm.advantages(rewards), "token_weight": algorithm.token_weight(tokens, 100)}
    for method, values in found.items():
        if not isinstance(values, Tensor) or values.shape != rewards.shape or not bool(values.isfinite().all()):
            is_shaped = isinstance(values, Tensor) and values.shape != rewards.shape
            what = f"a tensor of shape {tuple(values.shape)}" if is_shaped else repr(values)
            raise RecipeError(
                f"model.algorithm: {name}.{method} gives {what} for {answers} answers to each of 2 prompts; return a "
                f"finite number for each, (2, {answers})"
            )
    with explained("model.algorithm", f"fix {name}"):
        alone = torch.cat([algorithm.advantages(of_prompt[None]) for of_prompt in rewards])
    if alone.shape != rewards.shape or not torch.allclose(alone, found["advantages"], rtol=1e-4, atol=1e-6):
        raise RecipeError(
            f"model.algorithm: {name}.advantages gives {found['advantages'].tolist()} for two prompts together, and "
            f"{alone.tolist()} one by one; compute those of a prompt from its own rewards, because the size of "
            "micro-batches must not change what is trained"
        )
