"""Order and number of the samples that an epoch draws from each of several sources.

The proportions are exact, not random: the samples of a source are spread evenly over the epoch, so that
any part of it has the requested ratio to within about a sample for each source.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lit_ft.errors import RecipeError

Strategy = Literal["concatenate", "first_exhausted", "all_exhausted"]


@dataclass(frozen=True)
class Mixing:
    """Rule that combines several sources."""

    strategy: Strategy = "concatenate"
    """concatenate: every sample once; first_exhausted: the epoch ends when the first source is used up; all_exhausted:
    it ends when every source was used up, and shorter ones repeat."""
    weights: tuple[float, ...] | None = None
    """Weight of each source, relative to the sum of all; None weights by number of samples."""

    def draws(self, sizes: Sequence[int]) -> list[int]:
        """Number of samples that an epoch draws from each source."""
        if self.strategy == "concatenate" or self.weights is None:
            return list(sizes)
        shares = np.array(self.weights) / sum(self.weights)
        epochs = np.array(sizes) / shares  # length at which each source runs out
        length = epochs.min() if self.strategy == "first_exhausted" else epochs.max()
        return [max(1, round(length * share)) for share in shares]

    def order(self, source: np.ndarray, shuffle: bool, seed: int | list[int]) -> np.ndarray:
        """Indices of the samples of an epoch, in order, ``(draws,)``, int64.

        Args:
            source: source number of each sample, ``(samples,)``.
            shuffle: random order; otherwise the order within each source is kept.
            seed: seed of the random order.
        """
        generator = np.random.default_rng(seed)
        if self.strategy == "concatenate":
            return generator.permutation(len(source)) if shuffle else np.arange(len(source))
        members = [np.flatnonzero(source == number) for number in range(int(source.max()) + 1)]
        chosen, places = [], []
        for mine, count in zip(members, self.draws([len(mine) for mine in members]), strict=True):
            passes = -(-count // max(len(mine), 1))
            one = [generator.permutation(mine) if shuffle else mine for _ in range(passes)]
            chosen.append(np.concatenate(one)[:count])
            # One draw in each of `count` equal parts of the epoch.
            jitter = generator.random(count) if shuffle else 0.5
            places.append((np.arange(count) + jitter) / count)
        return np.concatenate(chosen)[np.argsort(np.concatenate(places), kind="stable")]


def check_weights(weights: Sequence[float | None], strategy: Strategy, option: str = "data.sources") -> Mixing:
    """Check the weights of a recipe's sources and build their mixing.

    Raises:
        RecipeError: some sources have a weight and others none, a weight is not above 0, or the strategy ignores it.
    """
    given = [weight for weight in weights if weight is not None]
    if not given:
        return Mixing(strategy)
    if len(given) < len(weights):
        raise RecipeError(
            f"{option}: {len(given)} of {len(weights)} sources with a weight; give one to each, or to none"
        )
    if bad := [weight for weight in given if not 0 < weight < float("inf")]:
        raise RecipeError(f"{option}: weight={bad[0]} must be above 0; leave the source out instead")
    if strategy == "concatenate":
        raise RecipeError(
            f"{option}: weights are set, but data.mixing=concatenate takes every sample once; set data.mixing to "
            "first_exhausted or all_exhausted, or leave the weights out"
        )
    return Mixing(strategy, tuple(given))
