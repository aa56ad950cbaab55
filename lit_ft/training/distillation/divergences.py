"""How far a model's probabilities of the next token are from its teacher's."""

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor
from torch.nn.functional import kl_div

from lit_ft.errors import RecipeError
from lit_ft.training.loss.token_weights import with_options
from lit_ft.training.trial import Trial


class Divergence(ABC):
    """Divergence between two distributions of the next token, 0 where they are the same; the student's is trained.

    Both are softmax of logits over ``temperature``. The loss is the divergence times its square, so that gradients keep
    their size (Hinton et al. 2015, arXiv:1503.02531, section 2).
    """

    def __init__(self, temperature: float = 1.0) -> None:
        """Set what logits are divided by.

        Args:
            temperature: above 0; above 1, less probable tokens count more.
        """
        if not 0 < temperature < math.inf:
            raise RecipeError(f"model.divergence: temperature={temperature} must be above 0 and finite; 1 is usual")
        self.temperature = temperature

    @abstractmethod
    def of(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Divergence at n positions, ``(n,)``, in nats, from log-probabilities ``(n, V)``, fp32."""

    def __repr__(self) -> str:
        """Name and options, e.g. ``ForwardKL(temperature=1)``."""
        return with_options(self)


class ForwardKL(Divergence):
    """``KL(teacher || student)``: the student gives probability to all that the teacher does (Hinton et al. 2015)."""

    def of(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Divergence at each position, ``(n,)``."""
        return kl_div(student, teacher, log_target=True, reduction="none").sum(-1)


class ReverseKL(Divergence):
    """``KL(student || teacher)``: the student gives none to what the teacher gives none (MiniLLM, arXiv:2306.08543)."""

    def of(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Divergence at each position, ``(n,)``."""
        return kl_div(teacher, student, log_target=True, reduction="none").sum(-1)


class JensenShannon(Divergence):
    """``beta KL(teacher || m) + (1 - beta) KL(student || m)`` with ``m = beta teacher + (1 - beta) student``.

    Agarwal et al. 2024 (GKD, arXiv:2306.13649, equation 1). Over ``beta`` it nears the forward divergence for a small
    ``beta``, over ``1 - beta`` the reverse one for a large one.
    """

    def __init__(self, beta: float = 0.5, temperature: float = 1.0) -> None:
        """Set the teacher's part in the mixture.

        Args:
            beta: between 0 and 1, exclusive.
            temperature: what logits are divided by, above 0.
        """
        super().__init__(temperature)
        if not 0 < beta < 1:
            raise RecipeError(
                f"model.divergence: JensenShannon's beta={beta} must be between 0 and 1; take lit_ft.ForwardKL in "
                "place of 0, lit_ft.ReverseKL in place of 1"
            )
        self.beta = beta

    def of(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Divergence at each position, ``(n,)``."""
        mixture = torch.logaddexp(teacher + math.log(self.beta), student + math.log1p(-self.beta))
        parts = (kl_div(mixture, one, log_target=True, reduction="none").sum(-1) for one in (teacher, student))
        of_teacher, of_student = parts
        return self.beta * of_teacher + (1 - self.beta) * of_student


def check_divergence(divergence: Divergence) -> None:
    """Try a divergence at three positions, so that one that a user has written fails before the long work starts.

    Raises:
        RecipeError: it is no finite number of 0 or above for each position, is not 0 for equal distributions, depends
            on other positions, or has no gradient.
    """
    trial = Trial("model.divergence", divergence)
    teacher = torch.tensor([[0.0, 1.0, 2.0], [3.0, 0.0, 0.0], [0.0, 0.0, 0.0]]).log_softmax(-1)
    student = torch.tensor([[2.0, 1.0, 0.0], [0.0, 0.0, 0.0], [1.0, 0.0, 2.0]]).log_softmax(-1).requires_grad_()
    found = trial.numbers("of", lambda: divergence.of(student, teacher), (3,), "3 positions")
    if not found.requires_grad:
        raise RecipeError(
            f"model.divergence: {trial.name}.of has no gradient; compute it from the student's log-probabilities"
        )
    same = trial.numbers("of", lambda: divergence.of(teacher, teacher), (3,), "3 positions")
    if not bool((found.isfinite() & (found > 0) & (same.abs() < 1e-5)).all()):
        raise RecipeError(
            f"model.divergence: {trial.name}.of gives {found.tolist()} for distributions that differ, and "
            f"{same.tolist()} for equal ones; it must be finite and above 0 for the first, and 0 for the second"
        )
    fix = "compute each from its own position, because positions come in parts"
    pairs = list(zip(student.split(1), teacher.split(1), strict=True))
    trial.check_alone("of", found, lambda: [divergence.of(*both) for both in pairs], "3 positions", fix)
