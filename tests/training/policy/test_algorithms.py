"""Algorithms: advantages and weights of tokens against their formulas, and own ones that are refused."""

import pytest
import torch
from torch import Tensor

from lit_ft import DAPO, GRPO, RLOO, DrGRPO, RecipeError
from lit_ft.training.policy.algorithms import Algorithm, check_algorithm

REWARDS = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.5, 0.5, 0.5, 0.5], [3.0, 1.0, 0.0, 0.0]])
TOKENS = torch.tensor([[1.0, 2.0, 4.0, 8.0]]).expand(3, 4)


def test_grpo() -> None:
    mean, std = REWARDS.mean(1, keepdim=True), REWARDS.std(1, keepdim=True)
    torch.testing.assert_close(GRPO().advantages(REWARDS), (REWARDS - mean) / (std + 1e-4))
    torch.testing.assert_close(GRPO(scale_rewards=False).advantages(REWARDS), REWARDS - mean)
    assert GRPO().token_weight(TOKENS, 16)[0].tolist() == [1, 0.5, 0.25, 0.125]


@pytest.mark.parametrize("algorithm", [GRPO(), DrGRPO(), RLOO()])
@pytest.mark.parametrize("answers", [2, 3, 6, 7])
def test_equal_rewards_are_no_signal(algorithm: Algorithm, answers: int) -> None:
    """Also where their mean is rounded."""
    assert not algorithm.advantages(torch.full((2, answers), 0.1)).any()


def test_dr_grpo() -> None:
    torch.testing.assert_close(DrGRPO().advantages(REWARDS), REWARDS - REWARDS.mean(1, keepdim=True))
    assert DrGRPO().token_weight(TOKENS, 16).unique().tolist() == [1 / 16]


def test_dapo() -> None:
    assert torch.equal(DAPO().advantages(REWARDS), GRPO().advantages(REWARDS))
    assert DAPO().token_weight(TOKENS, 16).unique().tolist() == [1]
    assert DAPO().counts_tokens
    assert not GRPO().counts_tokens


def test_rloo() -> None:
    others = torch.stack([(REWARDS.sum(1) - REWARDS[:, i]) / 3 for i in range(4)], 1)
    torch.testing.assert_close(RLOO().advantages(REWARDS), REWARDS - others)
    assert RLOO().token_weight(TOKENS, 16).unique().tolist() == [1]


class OverTheBatch(GRPO):
    def advantages(self, rewards: Tensor) -> Tensor:
        return rewards - rewards.mean()


class OnePerPrompt(GRPO):
    def token_weight(self, tokens: Tensor, max_new_tokens: int) -> Tensor:
        return 1 / tokens.sum(1)


class Infinite(GRPO):
    def advantages(self, rewards: Tensor) -> Tensor:
        return rewards / 0


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (OverTheBatch(), "compute those of a prompt from its own rewards, because the size of micro-batches"),
        (
            OnePerPrompt(),
            r"token_weight gives a tensor of shape \(2,\) for 3 answers to each of 2 prompts",
        ),
        (Infinite(), "Infinite.advantages gives .*; return finite numbers"),
    ],
)
def test_own_algorithms_that_are_refused(algorithm: Algorithm, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        check_algorithm(algorithm, 3)


@pytest.mark.parametrize("algorithm", [GRPO(), GRPO(scale_rewards=False), DrGRPO(), DAPO(), RLOO()])
def test_those_of_here_pass(algorithm: Algorithm) -> None:
    check_algorithm(algorithm, 2)
    assert repr(algorithm).startswith(type(algorithm).__name__)
