"""Divergences against torch's distributions, and their gradients through a chunked loss against autograd's."""

import math
from typing import Any

import pytest
import torch
from devices import Calls
from torch import Tensor, nn
from torch.distributions import Categorical, kl_divergence
from torch.nn.functional import cross_entropy

from lit_ft.errors import RecipeError
from lit_ft.training.distillation.divergences import (
    Divergence,
    ForwardKL,
    JensenShannon,
    ReverseKL,
    check_divergence,
)
from lit_ft.training.distillation.teacher_loss import TeacherLoss
from lit_ft.training.loss.token_cross_entropy import token_cross_entropy


def _both() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(2, 7, 11, generator=generator)
    return logits[0].log_softmax(-1), logits[1].log_softmax(-1)


def _mixture(weight: float, student: Tensor, teacher: Tensor) -> Tensor:
    of_teacher, of_student = Categorical(logits=teacher), Categorical(logits=student)
    both = Categorical(probs=weight * of_teacher.probs + (1 - weight) * of_student.probs)
    return weight * kl_divergence(of_teacher, both) + (1 - weight) * kl_divergence(of_student, both)


@pytest.mark.parametrize(
    ("divergence", "expected"),
    [
        (ForwardKL(), lambda s, t: kl_divergence(Categorical(logits=t), Categorical(logits=s))),
        (ReverseKL(), lambda s, t: kl_divergence(Categorical(logits=s), Categorical(logits=t))),
        (JensenShannon(), lambda s, t: _mixture(0.5, s, t)),
        (JensenShannon(beta=0.1), lambda s, t: _mixture(0.1, s, t)),
    ],
)
def test_values_are_those_of_torch(divergence: Divergence, expected: Any) -> None:
    student, teacher = _both()
    torch.testing.assert_close(divergence.of(student, teacher), expected(student, teacher))
    check_divergence(divergence)


def test_a_small_or_large_beta_nears_the_others() -> None:
    student, teacher = (log_probs.double() for log_probs in _both())
    small, large = (JensenShannon(beta).of(student, teacher) / 1e-6 for beta in (1e-6, 1 - 1e-6))
    torch.testing.assert_close(small, ForwardKL().of(student, teacher), rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(large, ReverseKL().of(student, teacher), rtol=1e-2, atol=1e-2)


def test_options_that_a_run_names() -> None:
    assert repr(JensenShannon(beta=0.25)) == "JensenShannon(temperature=1, beta=0.25)"
    assert repr(ReverseKL(temperature=2.0)) == "ReverseKL(temperature=2)"


class FixedTeacher:
    """Teacher whose hidden states are its logits."""

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden


@pytest.mark.parametrize(
    "divergence", [ForwardKL(), ReverseKL(temperature=2.0), JensenShannon(beta=0.3, temperature=0.5)]
)
@pytest.mark.parametrize("ratio", [0.25, 1.0])
@pytest.mark.parametrize("chunk", [3, 100])
@pytest.mark.parametrize("trains_head", [False, True])
def test_gradients_are_those_of_the_formula(
    monkeypatch: pytest.MonkeyPatch, divergence: Divergence, ratio: float, chunk: int, trains_head: bool
) -> None:
    """In chunks, within them in rows, with a teacher that knows the first 9 of 12 tokens."""
    monkeypatch.setattr("lit_ft.training.distillation.teacher_loss.LOGITS_AT_ONCE", 24)
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(10, 5, generator=generator, requires_grad=True)
    head = nn.Linear(5, 12, bias=False)
    head.requires_grad_(trains_head)
    of_teacher = 2 * torch.randn(10, 9, generator=generator)
    targets = torch.randint(12, (10,), generator=generator)
    loss_of = TeacherLoss(FixedTeacher(), of_teacher, divergence, ratio)  # type: ignore[arg-type]
    found = token_cross_entropy(hidden, head, targets, chunk, list(head.parameters()), loss_of=loss_of)
    inputs = [hidden, *(head.parameters() if trains_head else [])]
    gradients = torch.autograd.grad(found.loss_sum, inputs)

    logits, heat = head(hidden), divergence.temperature
    far = divergence.of((logits[:, :9] / heat).log_softmax(-1), (of_teacher / heat).log_softmax(-1)) * heat**2
    each = ratio * far + (1 - ratio) * cross_entropy(logits, targets, reduction="none")
    torch.testing.assert_close(found.per_token, each.detach())
    torch.testing.assert_close(found.loss_sum, each.sum())
    torch.testing.assert_close(loss_of.total, far.detach().sum())
    assert int(found.correct) == int((logits.argmax(-1) == targets).sum())
    for got, wanted in zip(gradients, torch.autograd.grad(each.sum(), inputs), strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize(("temperature", "quotients"), [(1.0, 0), (2.0, 2)])
def test_logits_are_divided_by_another_temperature_than_1_alone(temperature: float, quotients: int) -> None:
    """Each quotient is a copy of the logits of a chunk."""
    loss_of = TeacherLoss(FixedTeacher(), torch.randn(4, 9), ForwardKL(temperature), 1.0)  # type: ignore[arg-type]
    head, targets = nn.Linear(5, 12), torch.zeros(4, dtype=torch.long)
    with torch.no_grad(), Calls() as seen:
        token_cross_entropy(torch.randn(4, 5), head, targets, 100, list(head.parameters()), loss_of=loss_of)
    assert seen.count("aten::div") == quotients


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ForwardKL(temperature=0), "temperature=0 must be above 0 and finite; 1 is usual"),
        (lambda: ReverseKL(temperature=math.inf), "temperature=inf must be above 0"),
        (lambda: JensenShannon(beta=1.0), "beta=1.0 must be between 0 and 1; take lit_ft.ForwardKL in place of 0"),
    ],
)
def test_options_that_are_refused(make: Any, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        make()


class Own(Divergence):
    """Divergence that a function computes."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def of(self, student: Tensor, teacher: Tensor) -> Tensor:
        found: Tensor = self.function(student, teacher)
        return found


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda s, t: (s - t).sum(), r"gives a tensor of shape \(\) for 3 positions; return one number for each"),
        (lambda s, t: 3, "gives int for 3 positions"),
        (lambda s, t: (t - s).detach().square().sum(-1), "has no gradient; compute it from the student's"),
        (lambda s, t: s.sum(-1), "it must be finite and above 0 for the first, and 0 for the second"),
        (lambda s, t: ((s - t) ** 2).sum(-1) / len(s), "one by one; compute each from its own position"),
        (lambda s, t: s[0] @ t.T[:2], "model.divergence: RuntimeError: .*; fix Own"),
    ],
)
def test_own_ones_are_tried(function: Any, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        check_divergence(Own(function))
    check_divergence(Own(lambda s, t: ((s - t) ** 2).sum(-1)))
