"""Values that a sweep tries: ``--vary KEY=VALUE,VALUE`` and ``--vary KEY=LOW..HIGH``."""

import itertools
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import yaml

from lit_ft.bounded_yaml import load_yaml
from lit_ft.errors import RecipeError

LOG_RATIO = 10
"""Ratio of the ends of a positive range from which on it is sampled logarithmically."""
_OWN_KEYS = ("run_dir", "ckpt_path", "resume", "resume_data")


@dataclass(frozen=True)
class Range:
    """Numbers from ``low`` to ``high``, both included; integers if both ends are, else both are floats."""

    low: int | float
    high: int | float

    @property
    def is_logarithmic(self) -> bool:
        """Whether the range is sampled logarithmically: it is positive and spans a factor of ``LOG_RATIO``."""
        return self.low > 0 and self.high >= LOG_RATIO * self.low


@dataclass(frozen=True)
class Variation:
    """An option of ``fit`` and what it is varied over.

    Attributes:
        key: name of the option, without dashes.
        values: values as they are written on a command line, or a range.
    """

    key: str
    values: tuple[str, ...] | Range

    @property
    def samples(self) -> tuple[str, ...]:
        """The values, or both ends of a range."""
        return (str(self.values.low), str(self.values.high)) if isinstance(self.values, Range) else self.values


def parse_variations(texts: Sequence[str]) -> list[Variation]:
    """Parse the values of all ``--vary`` options.

    Raises:
        RecipeError: a value is not of the form KEY=VALUE,VALUE, a key is given twice, or the sweep sets it itself.
    """
    variations = [_parse(text) for text in texts]
    keys = [variation.key for variation in variations]
    if repeated := [key for key in keys if keys.count(key) > 1]:
        raise RecipeError(f"--vary {repeated[0]} is given twice; give all its values in one: {repeated[0]}=A,B,C")
    return variations


def _parse(text: str) -> Variation:
    key, equals, listed = text.partition("=")
    key = key.strip().removeprefix("--")
    if not equals or not key:
        raise RecipeError(f"--vary {text!r} must be KEY=VALUE,VALUE, e.g. --vary optimizer.lr=1e-4,2e-4")
    if key in _OWN_KEYS:
        raise RecipeError(f"--vary {key}: the sweep sets it for each trial; vary an option of model, data or trainer")
    if (ends := re.fullmatch(r"([^,\[]+?)\.\.([^,]+)", listed)) and (parsed := _range(ends[1], ends[2])) is not None:
        if not parsed.low < parsed.high:
            raise RecipeError(f"--vary {text}: a range goes from a lower to a higher number; exchange its ends")
        return Variation(key, parsed)
    try:
        values = load_yaml(f"[{listed}]")
    except yaml.YAMLError as error:
        raise RecipeError(f"--vary {text}: the values must be YAML, separated by commas; quote texts") from error
    if not isinstance(values, list) or not values:
        raise RecipeError(f"--vary {text} names no value; give some, e.g. --vary optimizer.lr=1e-4,2e-4")
    return Variation(key, tuple(value if isinstance(value, str) else json.dumps(value) for value in values))


def _range(low: str, high: str) -> Range | None:
    try:
        is_whole = all(re.fullmatch(r"\s*[+-]?\d+\s*", end) for end in (low, high))
        ends = [int(end) if is_whole else float(end) for end in (low, high)]
    except ValueError:
        return None  # a text with two dots in it, e.g. a path
    return Range(*ends) if all(map(math.isfinite, ends)) else None


def combinations(variations: Sequence[Variation]) -> Iterator[dict[str, str]]:
    """Values of each trial of a grid, by key; the last key varies fastest.

    Raises:
        RecipeError: a variation is a range.
    """
    for variation in variations:
        if isinstance(variation.values, Range):
            raise RecipeError(
                f"--vary {variation.key} is a range, which a grid cannot go through; add --trials N, or list values"
            )
    keys = [variation.key for variation in variations]
    for values in itertools.product(*(variation.samples for variation in variations)):
        yield dict(zip(keys, values, strict=True))


def probes(variations: Sequence[Variation]) -> Iterator[dict[str, str]]:
    """Few combinations in which each value, or end of a range, occurs: one key is changed at a time."""
    first = {variation.key: variation.samples[0] for variation in variations}
    yield first
    for variation in variations:
        for value in variation.samples[1:]:
            yield {**first, variation.key: value}


def described(values: dict[str, str]) -> str:
    """Text of the form ``optimizer.lr=1e-4 model.peft.r=8``."""
    return " ".join(f"{key}={value}" for key, value in values.items())
