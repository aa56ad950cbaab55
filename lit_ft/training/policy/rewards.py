"""Rewards of answers that the model has given: numbers, of which a higher one is a better answer."""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any, NamedTuple, SupportsFloat

import torch

from lit_ft.errors import RecipeError, check_counts, check_types, explained
from lit_ft.protocols import FinishReason
from lit_ft.training.answer_scores.rouge_and_bleu import words_and_signs
from lit_ft.training.loss.token_weights import with_options


class SampledAnswer(NamedTuple):
    """An answer that the model has given to a prompt of the data."""

    prompt: str
    """All that the model has seen, with special tokens as text."""
    answer: str
    """Without special tokens, and without white space around it."""
    expected: str
    """Answer of the data to this prompt, in the same form; empty where the data has none."""
    tokens: int
    """Number of the answer's tokens, with the one that ended it."""
    finish_reason: FinishReason | None
    """What ended it: stop (the model itself) or length (``max_new_tokens``)."""
    columns: Mapping[str, object] = MappingProxyType({})
    """Values of the prompt's row, of the columns that rewards name; None where the row has none."""
    messages: Sequence[Mapping[str, Any]] = ()
    """Turns of the prompt, each with role and content; empty where no reward reads them."""
    tools: Sequence[Mapping[str, Any]] | None = None
    """JSON schemas of the functions that may be called, beside ``messages``."""


class Reward(ABC):
    """Rewards of answers."""

    columns: Sequence[str] = ()
    """Names of columns of the data that it reads in the ``columns`` of answers."""
    reads_messages: bool = False
    """Whether it reads the ``messages`` of answers."""
    reads_expected: bool = True
    """Whether it reads the ``expected`` answer; where no reward does, rows of the data may be without one."""
    uses_device: bool = False
    """Whether it computes on ``device``; `check`, which has none, does not try it."""
    device: torch.device = torch.device("cpu")
    """Device of the run."""

    def check(self) -> None:  # noqa: B027 (most have nothing to find)
        """Find what is wrong before weights are read.

        Raises:
            RecipeError: there is something.
        """

    @abstractmethod
    def of(self, answers: Sequence[SampledAnswer]) -> Sequence[float]:
        """Rewards of some answers, one finite number for each; any of them may come together."""

    @property
    def name(self) -> str:
        """Name in metrics: ``train/rewards/<name>``."""
        return type(self).__name__

    def __repr__(self) -> str:
        """Name and options, e.g. ``Matches(pattern='<think>.*')``."""
        return with_options(self)


class ExactAnswer(Reward):
    """1 where the answer is the expected one, else 0."""

    def of(self, answers: Sequence[SampledAnswer]) -> Sequence[float]:
        """1 or 0 for each answer."""
        return [float(one.answer == one.expected) for one in answers]


class FinalNumber(Reward):
    """1 where the last number of the answer equals the last number of the expected answer, else 0.

    For arithmetic with steps, e.g. GSM8K (Cobbe et al. 2021, arXiv:2110.14168), whose answers end in ``#### 42``.

    Numbers are ``42``, ``-3``, ``.5``, ``1e5``, fractions as ``3/4``, and groups of three digits: ``1,234``, ``1 234``,
    ``1'234``, ``1_234``. They may touch letters and signs: ``$5``, ``18kg``; ``50%`` is 50. Other commas, hyphens and
    colons separate numbers: the last one of ``0,5``, ``10-5`` and ``2:5`` is 5. What is made of digits, dots and
    slashes and is none of these (``1.2.3``, ``5/6/2024``) is no number, nor are its parts.
    """

    def of(self, answers: Sequence[SampledAnswer]) -> Sequence[float]:
        """1 or 0 for each answer.

        Raises:
            RecipeError: an expected answer has no number.
        """
        return [float(_last_number(one.answer) == self._expected(one)) for one in answers]

    def _expected(self, one: SampledAnswer) -> float:
        if (number := _last_number(one.expected)) is None:
            raise RecipeError(
                f"model.rewards: FinalNumber compares numbers, and the data's answer {one.expected!r} has none; take "
                "another reward, or other data"
            )
        return number


_NUMBER = re.compile(
    r"""
    (?<!\d) (?P<sign>[-\u2212\uff0d]?)                        # hyphen, minus, and the full-width one
    (?P<digits>
        (?: \d{1,3} (?P<separator>[,_'\u2019\ \u00a0\u2009\u202f]) \d{3} (?: (?P=separator) \d{3} )* (?!\d) | \d+ )
        (?: \.\d+ )?
        | (?<![A-Za-z.]) \.\d+                                # after a letter or a dot, the dot ends a sentence
    )
    (?P<exponent> [eE] [-+]? \d+ )?
    (?: / (?P<denominator> \d+ (?: \.\d+ )? | \.\d+ ) )?
    (?P<more> [./] \d [\d./]* )?
    """,
    re.VERBOSE,
)


def _last_number(text: str) -> float | None:
    values = [value for match in _NUMBER.finditer(text) if (value := _value(match)) is not None]
    return values[-1] if values else None


def _value(match: re.Match[str]) -> float | None:
    """Number that ``_NUMBER`` has found; None for what only begins like one, and for what is not finite."""
    digits, separator = match["digits"], match["separator"] or ","
    value = float(digits.replace(separator, "") + (match["exponent"] or "")) * (-1 if match["sign"] else 1)
    denominator = float(match["denominator"] or 1)
    if match["more"] or not denominator or math.isinf(value) or math.isinf(denominator):
        return None
    return value / denominator


class Similarity(Reward):
    """How like the expected answer an answer is, 0 to 1: twice what both have in common, in order, over all of both.

    In common is the longest common subsequence: of characters where the expected answer has 100 at most, else of words
    and signs (ROUGE-L, Lin 2004, https://aclanthology.org/W04-1013), where unrelated texts have less in common; in
    scripts without spaces each character is a word. Where no answer is right yet, it says which is nearer.
    """

    def of(self, answers: Sequence[SampledAnswer]) -> Sequence[float]:
        """Similarity of each answer."""
        expected = {text: _Expected(text) for text in {one.expected for one in answers}}
        return [expected[one.expected].similarity(one.answer) for one in answers]


_MAX_CHARACTERS = 100
"""Length of an expected answer up to which ``Similarity`` compares characters."""


class _Expected:
    """Expected answer, prepared for several answers to be compared with it."""

    def __init__(self, text: str) -> None:
        self._split: Callable[[str], Sequence[str]] = words_and_signs if len(text) > _MAX_CHARACTERS else str
        parts = self._split(text)
        self._length = len(parts)
        self._places: dict[str, int] = {}  # of each part, as bits
        for index, part in enumerate(parts):
            self._places[part] = self._places.get(part, 0) | 1 << index

    def similarity(self, answer: str) -> float:
        """Twice the parts in common over all parts of both; 1 where there are none."""
        parts = self._split(answer)
        both = len(parts) + self._length
        return 2 * self._in_common(parts) / both if both else 1.0

    def _in_common(self, parts: Sequence[str]) -> int:
        """Length of the longest common subsequence, by the bit vectors of Hyyro 2004: a few operations for each part.

        "Bit-parallel LCS-length computation revisited", AWOCA 2004. A bit that is 0 is a part that is in common.
        """
        every = unmatched = (1 << self._length) - 1
        for part in parts:
            here = unmatched & self._places.get(part, 0)
            unmatched = ((unmatched + here) | (unmatched - here)) & every
        return self._length - unmatched.bit_count()


class Matches(Reward):
    """1 where a regular expression matches the whole answer, else 0: for a form that answers are to have."""

    reads_expected = False

    def __init__(self, pattern: str) -> None:
        r"""Set the form.

        Args:
            pattern: Python's regular expression, in which a dot matches line breaks, e.g. '<think>.+</think>\s*\d+'.
        """
        check_types("model.rewards", Matches.__init__, locals())
        self.pattern = pattern
        try:
            self._compiled = re.compile(pattern, re.DOTALL)
        except re.error as error:
            raise RecipeError(
                f"model.rewards: pattern={pattern!r} of Matches is no regular expression ({error}); Python's syntax: "
                "https://docs.python.org/3/library/re.html"
            ) from None

    def of(self, answers: Sequence[SampledAnswer]) -> Sequence[float]:
        """1 or 0 for each answer."""
        return [float(self._compiled.fullmatch(one.answer) is not None) for one in answers]


class OverlongPenalty(Reward):
    """0 for answers of up to ``free_tokens``, then falling evenly, to -1 at ``max_tokens`` and for answers cut there.

    Soft overlong punishment of DAPO (Yu et al. 2025, arXiv:2503.14476, equation 13).
    """

    reads_expected = False

    def __init__(self, free_tokens: int, max_tokens: int) -> None:
        """Set the lengths.

        Args:
            free_tokens: longest answer, in tokens, that costs nothing.
            max_tokens: length whose reward is -1, at most ``model.max_new_tokens``.
        """
        check_types("model.rewards", OverlongPenalty.__init__, locals())
        check_counts("model.rewards", free_tokens=free_tokens, max_tokens=max_tokens)
        if free_tokens >= max_tokens:
            raise RecipeError(
                f"model.rewards: OverlongPenalty: free_tokens={free_tokens} must be below max_tokens={max_tokens}"
            )
        self.free_tokens, self.max_tokens = free_tokens, max_tokens

    def of(self, answers: Sequence[SampledAnswer]) -> Sequence[float]:
        """Penalty of each answer, -1 to 0."""
        room = self.max_tokens - self.free_tokens
        return [-float(min(max((one.tokens - self.free_tokens) / room, 0.0), 1.0)) for one in answers]


def rewards_of(reward: Reward, answers: Sequence[SampledAnswer]) -> list[float]:
    """Rewards of answers.

    Raises:
        RecipeError: the reward fails, or gives something else than one finite number for each.
    """
    missing = [f"the column {name!r}" for name in reward.columns if any(name not in one.columns for one in answers)]
    missing += ["the turns of prompts"] if reward.reads_messages and not all(one.messages for one in answers) else []
    if missing:
        raise RecipeError(
            f"model.rewards: {reward.name} reads {missing[0]}, and the data module gives none with its batches; take "
            "lit_ft.TextDataModule, or give sample_rows (lit_ft.packed_batch.PackedBatch)"
        )
    with explained("model.rewards", f"fix {reward.name}"):
        found = list(reward.of(tuple(answers)))
    if len(found) != len(answers):
        raise RecipeError(
            f"model.rewards: {reward.name}.of gives {len(found)} values for {len(answers)} answers; return one for each"
        )
    numbers = [_number(value) for value in found]
    for value, number, one in zip(found, numbers, answers, strict=True):
        if not abs(number) <= torch.finfo(torch.float32).max:
            raise RecipeError(
                f"model.rewards: {reward.name}.of gives {value!r} for the answer {one.answer[:200]!r}; return a finite "
                "number"
            )
    return numbers


def _number(value: object) -> float:
    """A value as a number, also one of NumPy or torch; NaN for what is none."""
    with suppress(TypeError, ValueError, OverflowError, RuntimeError):
        return float(value) if isinstance(value, SupportsFloat) else math.nan
    return math.nan
