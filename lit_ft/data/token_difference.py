"""The place where two sequences of tokens part, and what they hold from there on."""

from collections.abc import Sequence
from itertools import zip_longest

from transformers import PreTrainedTokenizerBase

SHOWN = 6
"""Tokens that are shown of each side."""


def first_difference(ids: Sequence[int], others: Sequence[int]) -> int:
    """Number of the first token that differs, from 1; 0 if there is none."""
    pairs = enumerate(zip_longest(ids, others), 1)
    return next((number for number, (one, other) in pairs if one != other), 0)


def decoded_from(at: int, ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """Text and ids of the tokens from number ``at`` on, from 1."""
    shown = list(ids[at - 1 : at - 1 + SHOWN])
    return f"{tokenizer.decode(shown)!r} {shown}" if shown else "nothing more"
