"""Texts of single tokens, for pages that show what a model sees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, TypedDict

from lit_callbacks.batch_tokens import SampleTokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LONGEST_CHARACTER = 8
"""Maximum number of tokens that are joined because only together they are a character."""
CONTEXT = 4
"""Number of tokens before a token that are decoded with it, because tokenizers drop the space before a text's first."""


class TokenPiece(NamedTuple):
    """Text of a token, or of a few that are one character together."""

    text: str
    is_supervised: bool
    is_special: bool = False
    """Whether it is a special token, e.g. the end of a turn."""


class ShownSample(TypedDict):
    """Texts of a sample's tokens, of a long one without its middle."""

    tokens: int
    supervised: int
    """Number of its supervised tokens."""
    left_out: int
    """Number of tokens in its middle whose texts are left out."""
    left_out_supervised: int
    head: Sequence[TokenPiece]
    """Texts of its tokens up to the ones that are left out."""
    tail: Sequence[TokenPiece]


def show_sample(tokenizer: PreTrainedTokenizerBase, sample: SampleTokens, most_at_an_end: int) -> ShownSample:
    """Texts of a sample's tokens.

    Args:
        tokenizer: tokenizer of the sample.
        sample: the sample.
        most_at_an_end: maximum number of tokens at either end; those between are counted.
    """
    count = len(sample.ids)
    head, tail = (most_at_an_end, count - most_at_an_end) if count > 2 * most_at_an_end else (count, count)
    return {
        "tokens": count,
        "supervised": sum(sample.supervised),
        "left_out": tail - head,
        "left_out_supervised": sum(sample.supervised[head:tail]),
        "head": token_pieces(tokenizer, SampleTokens(sample.ids[:head], sample.supervised[:head])),
        "tail": token_pieces(tokenizer, SampleTokens(sample.ids[tail:], sample.supervised[tail:])),
    }


def token_pieces(tokenizer: PreTrainedTokenizerBase, sample: SampleTokens) -> list[TokenPiece]:
    """Texts of tokens; joined, they are the decoded sample, unless supervision begins or ends amid a character."""
    ids, supervised = sample
    added = getattr(tokenizer, "added_tokens_decoder", {})  # tokenizers of other libraries have none
    special = {*tokenizer.all_special_ids, *(id_ for id_, token in added.items() if token.special)}
    pieces: list[TokenPiece] = []
    start = 0
    for end in range(1, len(ids) + 1):
        text = _decoded_after(tokenizer, ids[max(0, start - CONTEXT) : start], ids[start:end])
        is_last = end == len(ids) or supervised[end] != supervised[start] or ids[end] in special
        if text.endswith("\ufffd") and not is_last and end - start < LONGEST_CHARACTER:
            continue  # a part of a character
        pieces.append(TokenPiece(text, supervised[start], ids[start] in special))
        start = end
    return pieces


def _decoded_after(tokenizer: PreTrainedTokenizerBase, before: Sequence[int], ids: Sequence[int]) -> str:
    """Text that tokens add to those before them."""
    known = _decoded(tokenizer, before)
    if known.endswith("\ufffd"):  # they would complete its last character
        return _decoded(tokenizer, ids)
    return _decoded(tokenizer, [*before, *ids])[len(known) :]


def _decoded(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    text: str = tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text
