"""Weights of supervised tokens in the loss, which depend on how probable the model finds each token."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from lit_ft.errors import RecipeError, explained


class TokenWeights(ABC):
    """Factor on the loss of each supervised token in training; it is a constant for the gradient."""

    @abstractmethod
    def of(self, cross_entropy: Tensor) -> Tensor:
        """Factors on the loss of n tokens, ``(n,)``, from their cross-entropy in nats, ``(n,)``, fp32."""

    def __repr__(self) -> str:
        """Name and options, e.g. ``DFT()``."""
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


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
        RecipeError: they are not a finite number of 0 or above for each token.
    """
    name, cross_entropy = type(weights).__name__, torch.tensor([0.0, 1.0, 8.0])
    with explained("model.token_weights", f"fix {name}"):
        factors = weights.of(cross_entropy)
    if not isinstance(factors, Tensor) or factors.shape != cross_entropy.shape:
        what = f"a tensor of shape {tuple(factors.shape)}" if isinstance(factors, Tensor) else type(factors).__name__
        raise RecipeError(f"model.token_weights: {name}.of gives {what} for 3 tokens; return one factor for each")
    if not bool((factors.isfinite() & (factors >= 0)).all()):
        raise RecipeError(
            f"model.token_weights: {name}.of gives {factors.tolist()} for cross-entropies of "
            f"{cross_entropy.tolist()}; factors must be 0 or above, and finite"
        )
