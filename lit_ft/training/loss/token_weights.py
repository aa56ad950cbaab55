"""Weights of supervised tokens in the loss, which depend on how probable the model finds each token."""

import inspect
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from lit_ft.errors import RecipeError, explained
from lit_ft.training.trial import Trial


def with_options(part: object) -> str:
    """Name of an object's class, and its attributes that are plain arguments of it or its bases: ``DPO(beta=0.1)``."""
    makers = [vars(kind)["__init__"] for kind in type(part).__mro__ if "__init__" in vars(kind)]
    names = {name for maker in makers for name in inspect.signature(maker).parameters}
    plain = (bool, int, float, str, list, tuple, type(None))
    options = {name: v for name, v in vars(part).items() if name in names and isinstance(v, plain)}
    texts = (f"{name}={v:g}" if type(v) in (int, float) else f"{name}={v!r}" for name, v in options.items())
    return f"{type(part).__name__}({', '.join(texts)})"


class TokenWeights(ABC):
    """Factor on the loss of each supervised token in training; it is a constant for the gradient."""

    @abstractmethod
    def of(self, cross_entropy: Tensor) -> Tensor:
        """Factors on the loss of n tokens, ``(n,)``, from their cross-entropy in nats, ``(n,)``, fp32."""

    def __repr__(self) -> str:
        """Name and options, e.g. ``DFT()``."""
        return with_options(self)


class DFT(TokenWeights):
    """Dynamic fine-tuning (Wu et al. 2025, arXiv:2508.05629, equation 9): the probability of the token itself.

    The gradient of cross-entropy is divided by this probability, so that tokens that the model finds improbable
    dominate it; the weight takes that back.
    """

    def of(self, cross_entropy: Tensor) -> Tensor:
        """Probabilities of the tokens, ``(n,)``."""
        return torch.exp(-cross_entropy)


def check_token_weights(weights: TokenWeights) -> None:
    """Try weights on three tokens, so that those that a user has written fail before the long work starts.

    Raises:
        RecipeError: they are not a finite number of 0 or above for each token, or depend on the tokens beside it.
    """
    trial, cross_entropy = Trial("model.token_weights", weights), torch.tensor([0.0, 1.0, 8.0])
    factors = trial.numbers("of", lambda: weights.of(cross_entropy), (3,), "3 tokens")
    if not bool((factors.isfinite() & (factors >= 0)).all()):
        raise RecipeError(
            f"model.token_weights: {trial.name}.of gives {factors.tolist()} for cross-entropies of "
            f"{cross_entropy.tolist()}; factors must be 0 or above, and finite"
        )
    fix = (
        "compute the factor of a token from it alone, because tokens come in parts of a micro-batch, whose size must "
        "not change what is trained"
    )
    of = f"cross-entropies of {cross_entropy.tolist()}"
    trial.check_alone("of", factors, lambda: [weights.of(one) for one in cross_entropy.split(1)], of, fix)
    with explained("model.token_weights", f"fix {trial.name}: a micro-batch may have no supervised token"):
        weights.of(cross_entropy[:0])
