"""Objectives against the equations of their papers, written out with Python's numbers."""

import math
from collections.abc import Callable

import pytest
import torch

from lit_ft.errors import RecipeError
from lit_ft.training.preference.objectives import DPO, IPO, ORPO, AnswerLogProbs, Objective, SimPO

CHOSEN = {"policy": -12.0, "reference": -14.0, "tokens": 8.0}
REJECTED = {"policy": -20.0, "reference": -19.0, "tokens": 10.0}


def _answer(**values: float) -> AnswerLogProbs:
    return AnswerLogProbs(**{name: torch.tensor([value]) for name, value in values.items()})


def _log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


def _odds(mean: float) -> float:
    return math.exp(mean) / (1 - math.exp(mean))


@pytest.mark.parametrize(
    ("objective", "loss", "rewards"),
    [
        (DPO(), -_log_sigmoid(0.1 * 3), (0.2, -0.1)),
        (DPO(beta=0.5), -_log_sigmoid(1.5), (1.0, -0.5)),
        (DPO(label_smoothing=0.1), -0.9 * _log_sigmoid(0.3) - 0.1 * _log_sigmoid(-0.3), (0.2, -0.1)),
        (DPO(nll_weight=2.0), -_log_sigmoid(0.3) + 2 * 12 / 8, (0.2, -0.1)),
        (IPO(), (2 / 8 + 1 / 10 - 5) ** 2, (0.1 * 2 / 8, -0.1 / 10)),
        (SimPO(), -_log_sigmoid(2 * (-1.5 + 2) - 1), (-3.0, -4.0)),
        (SimPO(beta=1.0, gamma=0.0), -_log_sigmoid(0.5), (-1.5, -2.0)),
        (ORPO(), 1.5 - 0.1 * _log_sigmoid(math.log(_odds(-1.5) / _odds(-2.0))), (-0.15, -0.2)),
    ],
)
def test_losses_and_rewards(objective: Objective, loss: float, rewards: tuple[float, float]) -> None:
    chosen, rejected = _answer(**CHOSEN), _answer(**REJECTED)
    assert float(objective.losses(chosen, rejected)) == pytest.approx(loss, rel=1e-5)
    assert float(objective.reward(chosen)) == pytest.approx(rewards[0])
    assert float(objective.reward(rejected)) == pytest.approx(rewards[1])


def test_an_answer_that_is_certain_has_finite_odds() -> None:
    policy = torch.zeros(1, requires_grad=True)
    certain = AnswerLogProbs(policy, policy, torch.ones(1))
    loss = ORPO().losses(certain, _answer(**REJECTED))
    assert torch.isfinite(loss).all()
    assert torch.isfinite(torch.autograd.grad(loss.sum(), policy)[0]).all()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: DPO(beta=0.0), "beta=0.0 must be above 0"),
        (lambda: DPO(label_smoothing=0.5), "label_smoothing=0.5"),
        (lambda: DPO(nll_weight=-1.0), "nll_weight=-1.0"),
        (lambda: IPO(tau=math.inf), "tau=inf"),
        (lambda: SimPO(beta=-1.0), "beta=-1.0"),
        (lambda: SimPO(gamma=-0.1), "gamma=-0.1"),
        (lambda: ORPO(beta=math.nan), "beta=nan"),
    ],
)
def test_options_that_are_refused(make: Callable[[], Objective], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        make()
