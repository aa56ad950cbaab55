"""Texts of single tokens, for pages that show what a model sees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

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


def token_pieces(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], supervised: Sequence[bool]
) -> list[TokenPiece]:
    """Texts of a sample's tokens; joined, they are the decoded sample, if no mark changes amid a character.

    Args:
        tokenizer: tokenizer of the sample.
        ids: T token ids.
        supervised: T marks: whether each token is supervised.
    """
    added = getattr(tokenizer, "added_tokens_decoder", {})  # tokenizers of other libraries have none
    special = {*tokenizer.all_special_ids, *(id_ for id_, token in added.items() if token.special)}
    pieces: list[TokenPiece] = []
    start = 0
    for end in range(1, len(ids) + 1):
        text = _decoded_after(tokenizer, ids[max(0, start - CONTEXT) : start], ids[start:end])
        is_last = end == len(ids) or supervised[end] != supervised[start] or ids[end] in special
        if text.endswith("\ufffd") and not is_last and end - start < LONGEST_CHARACTER:
            continue  # a part of a character
        pieces.append(TokenPiece(text, bool(supervised[start]), ids[start] in special))
        start = end
    return pieces


def _decoded_after(tokenizer: PreTrainedTokenizerBase, before: Sequence[int], ids: Sequence[int]) -> str:
    """Text that tokens add to those before them."""
    known = _decoded(tokenizer, before)
    return _decoded(tokenizer, [*before, *ids])[len(known) :]


def _decoded(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    text: str = tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text
