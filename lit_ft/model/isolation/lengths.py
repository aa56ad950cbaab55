"""Samples of the packed batch that is being computed, for parts of a model that are not given them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from torch import Tensor

from lit_ft.errors import RecipeError


class SharedTokens(NamedTuple):
    """Layout of a packed batch of T tokens of which T' are computed, as the samples share the others."""

    lengths: list[int]
    """Tokens of each sample."""
    own_lengths: list[int]
    """Those of them that are computed, the last ones of the sample."""
    computed: Tensor
    """``(T',)``, int64: which tokens are computed."""
    places: Tensor
    """``(T,)``, int64: where each token is among those that are computed."""


_lengths: ContextVar[Sequence[int] | None] = ContextVar("_lengths", default=())
_shared: ContextVar[SharedTokens | None] = ContextVar("_shared", default=None)


@contextmanager
def samples_of(lengths: Sequence[int] | None, shared: SharedTokens | None = None) -> Iterator[None]:
    """Context that sets the lengths of the samples in a packed batch; None refuses who asks for them.

    Args:
        lengths: numbers of tokens of the samples that are computed.
        shared: which tokens they share; None where all are computed.
    """
    tokens = _lengths.set(lengths), _shared.set(shared)
    try:
        yield
    finally:
        _lengths.reset(tokens[0])
        _shared.reset(tokens[1])


def shared() -> SharedTokens | None:
    """Which tokens the samples share; None where all are computed."""
    return _shared.get()


def current() -> Sequence[int]:
    """Lengths of the samples; empty outside of a packed batch.

    Raises:
        RecipeError: they are refused.
    """
    lengths = _lengths.get()
    if lengths is None:
        raise RecipeError(
            "model.cuda_graphs: parts of this architecture are computed sample by sample, and a CUDA graph would "
            "repeat the samples of one batch; set model.cuda_graphs to false"
        )
    return lengths


def lengths_of(tokens: int) -> list[int] | None:
    """Lengths of the samples of a sequence of ``tokens`` tokens; None outside of a packed batch, as in generation.

    Raises:
        RecipeError: the sequence is a part of a packed batch, or has more tokens.
    """
    lengths = current()
    if not lengths:
        return None
    if sum(lengths) != tokens:
        raise RecipeError(
            f"this architecture computes {tokens} tokens at once of a packed batch with {sum(lengths)}, so its samples "
            "cannot be told apart; set data.micro_batch_size to 1, data.join_micro_batches to false and data.packing "
            "to null"
        )
    return list(lengths)
