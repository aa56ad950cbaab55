"""Objectives against the equations of their papers, written out with Python's numbers."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_ft.errors import RecipeError
from lit_ft.training.preference.objectives import DPO, IPO, KTO, ORPO, AnswerLogProbs, Objective, SimPO, check_objective

CHOSEN = {"policy": -12.0, "reference": -14.0, "tokens": 8.0, "divergence": 0.0}
REJECTED = {"policy": -20.0, "reference": -19.0, "tokens": 10.0, "divergence": 0.0}


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


@pytest.mark.parametrize(
    ("objective", "good", "bad"),
    [(KTO(), (0.1, 1), (0.1, 1)), (KTO(beta=0.5, desirable_weight=0.7, undesirable_weight=2.0), (0.5, 0.7), (0.5, 2))],
)
def test_the_loss_of_answers_that_are_judged(objective: KTO, good: Any, bad: Any) -> None:
    """One by one, and of a complete pair their mean."""
    divergence = {"divergence": 1.5}
    chosen, rejected = _answer(**CHOSEN | divergence), _answer(**REJECTED | divergence)
    missing = _answer(policy=1.5, reference=0.0, tokens=0.0, divergence=1.5)
    sigmoid = lambda x: 1 / (1 + math.exp(-x))  # noqa: E731
    of_good = good[1] * (1 - sigmoid(good[0] * (2 - 1.5)))
    of_bad = bad[1] * (1 - sigmoid(bad[0] * (1.5 + 1)))
    assert float(objective.losses(chosen, missing)) == pytest.approx(of_good, rel=1e-5)
    assert float(objective.losses(missing, rejected)) == pytest.approx(of_bad, rel=1e-5)
    assert float(objective.losses(chosen, rejected)) == pytest.approx((of_good + of_bad) / 2, rel=1e-5)
    assert float(objective.reward(chosen)) == pytest.approx(2 * good[0])


def test_options_that_a_run_names() -> None:
    assert repr(DPO(label_smoothing=0.1)) == "DPO(beta=0.1, label_smoothing=0.1, nll_weight=0)"
    assert repr(SimPO()) == "SimPO(beta=2, gamma=1)"


def test_an_answer_that_is_certain_has_finite_odds() -> None:
    policy = torch.zeros(1, requires_grad=True)
    certain = AnswerLogProbs(policy, policy, torch.ones(1), torch.zeros(1))
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
        (lambda: DPO(beta="0.1"), "model.objective.beta='0.1', and float is needed"),
        (lambda: IPO(tau=None), "model.objective.tau=None, and float is needed"),
    ],
)
def test_options_that_are_refused(make: Callable[[], Objective], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        make()


class Own(DPO):
    """As a user may write it, with what is wrong about it as a parameter."""

    def __init__(self, change: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.change = change

    def losses(self, chosen: AnswerLogProbs, rejected: AnswerLogProbs) -> Any:
        return self.change(super().losses(chosen, rejected))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (Tensor.mean, r"Own\.losses gives a tensor of shape \(\) for 3 pairs; return one number for each"),
        (Tensor.tolist, r"Own\.losses gives list for 3 pairs"),
        (Tensor.detach, r"Own\.losses has no gradient"),
        (
            lambda losses: losses - losses.mean(),
            r"Own\.losses gives .* for 3 pairs together, and \[0\.0, 0\.0, 0\.0\] one by one",
        ),
        (lambda losses: losses + torch.ones(2), r"model\.objective: RuntimeError: .*; fix Own"),
    ],
)
def test_own_objectives_that_are_refused(change: Callable[[Tensor], Any], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        check_objective(Own(change))


def test_an_own_objective_that_does_not_say_what_it_needs() -> None:
    silent = Own(Tensor.clone)
    check_objective(silent)
    silent.needs_reference = None
    with pytest.raises(RecipeError, match="Own has no needs_reference; set it to True or False"):
        check_objective(silent)


class Margin(DPO):
    """With options of its own beside those of its base, and an attribute that is none."""

    def __init__(self, kind: str = "hard", beta: float = 0.3) -> None:
        super().__init__(beta)
        self.kind, self.calls = kind, 7


def test_an_objective_is_named_with_its_options() -> None:
    assert repr(DPO()) == "DPO(beta=0.1, label_smoothing=0, nll_weight=0)"
    assert repr(Margin()) == "Margin(beta=0.3, label_smoothing=0, nll_weight=0, kind='hard')"
