"""Truncation of tokenized rows to ``max_length``."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from lit_ft.data.tokens.samples import targets_of
from lit_ft.packed_batch import IGNORE_INDEX

Overlong = Literal["truncate", "truncate_left_prompt", "drop", "error"]


@dataclass
class Encoded:
    """Concatenated samples of a batch of rows."""

    ids: np.ndarray
    """``(tokens,)``, int32."""
    labels: np.ndarray
    """``(tokens,)``, int32, unshifted; ``IGNORE_INDEX`` where not supervised."""
    lengths: np.ndarray
    """``(samples,)``, tokens per sample."""
    rows: np.ndarray
    """``(samples,)``: row of the batch that each sample comes from."""
    count: int
    """Number of rows of the batch."""
    bad: list[tuple[int, str]] = field(default_factory=list)
    """Rows that cannot be used, each with the problem."""
    too_long: list[tuple[int, int]] = field(default_factory=list)
    """Rows over the limit, each with its number of tokens; filled where that is an error."""
    full_lengths: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Tokens of each sample before ``max_length`` was applied, ``(samples before it,)``."""
    notes: Counter[str] = field(default_factory=Counter)
    """Counts by the names of ``tokenization.NOTES``."""
    chosen: np.ndarray | None = None
    """``(samples,)``, int64, where samples are pairs: tokens of the chosen conversation, 0 in a pair of a rejected one
    alone; None where they are not."""


def fit_to_length(
    encoded: Encoded,
    max_length: int | None,
    overlong: Overlong,
    fully_supervised: set[int],
    bos: int | None,
    keeps_ending: bool = False,
) -> Encoded:
    """Apply ``max_length``, and drop samples without supervised tokens.

    Args:
        encoded: samples of any length; changed in place and returned.
        max_length: maximum number of tokens of a sample; None for no limit.
        overlong: treatment of longer samples.
        fully_supervised: rows with every token supervised; they continue in further samples where others are truncated.
        bos: beginning-of-sequence id, which is kept where a prompt loses its beginning; None if there is none.
        keeps_ending: whether what is behind the last supervised token stays where a prompt loses its beginning.
    """
    encoded.full_lengths = encoded.lengths
    starts = np.concatenate([[0], np.cumsum(encoded.lengths)])
    is_long = encoded.lengths > max_length if max_length is not None else np.zeros(len(encoded.lengths), dtype=bool)
    notes = encoded.notes
    spans: list[tuple[int, np.ndarray]] = []  # (row, indices into the tokens)
    for k in np.flatnonzero(is_long):
        assert max_length is not None
        row, tokens = int(encoded.rows[k]), np.arange(starts[k], starts[k + 1])
        if overlong == "error":
            encoded.too_long.append((row, len(tokens)))
        elif overlong == "drop":
            notes["dropped"] += 1
        elif row in fully_supervised:
            notes["continued"] += 1
            # A sample's first token is never a target: the next one begins with the last of the one before.
            step = max(max_length - 1, 1)
            spans += [(row, tokens[at : at + max_length]) for at in range(0, len(tokens) - 1, step)]
        elif overlong == "truncate":
            notes["truncated"] += 1
            spans.append((row, tokens[:max_length]))
        else:
            spans.append((row, _without_early_prompt(tokens, encoded, max_length, bos, keeps_ending)))
    if is_long.any():
        kept = [(int(encoded.rows[k]), np.arange(starts[k], starts[k + 1])) for k in np.flatnonzero(~is_long)]
        kept = sorted([*kept, *spans], key=lambda span: span[0])
        order = np.concatenate([tokens for _, tokens in kept] or [np.zeros(0, dtype=np.int64)])
        encoded.ids, encoded.labels = encoded.ids[order], encoded.labels[order]
        encoded.rows = np.array([row for row, _ in kept], dtype=np.int64)
        encoded.lengths = np.array([len(tokens) for _, tokens in kept], dtype=np.int64)
    return _without_unsupervised(encoded)


def join_pairs(encoded: Encoded) -> Encoded:
    """Make one sample of the two conversations of each pair.

    A pair is left out where one of its conversations is missing, and, with a note, where both have the same tokens.

    Args:
        encoded: conversations, of row ``2 r`` the chosen and of row ``2 r + 1`` the rejected one of the pair of row
            ``r``, in this order and at most one of each; changed in place and returned.
    """
    rows, lengths = encoded.rows, encoded.lengths
    tokens = np.split(encoded.ids, np.cumsum(lengths)[:-1])
    first = np.flatnonzero((rows[:-1] % 2 == 0) & (rows[1:] == rows[:-1] + 1))
    kept = np.array([k for k in first if not np.array_equal(tokens[k], tokens[k + 1])], dtype=np.int64)
    if equal := len(first) - len(kept):
        encoded.notes["answers equal"] += equal
    of_token = np.repeat(np.isin(np.arange(len(rows)), np.concatenate([kept, kept + 1])), lengths)
    encoded.ids, encoded.labels = encoded.ids[of_token], encoded.labels[of_token]
    encoded.rows, encoded.lengths = rows[kept] // 2, lengths[kept] + lengths[kept + 1]
    encoded.chosen = lengths[kept]
    encoded.too_long = list({row // 2: length for row, length in encoded.too_long}.items())
    return encoded


def as_halves(encoded: Encoded) -> Encoded:
    """Make a pair of each conversation, whose other one is missing.

    Args:
        encoded: conversations, of row ``2 r`` a chosen and of row ``2 r + 1`` a rejected one; changed in place and
            returned.
    """
    encoded.chosen = np.where(encoded.rows % 2 == 0, encoded.lengths, 0)
    encoded.rows = encoded.rows // 2
    encoded.too_long = [(row // 2, length) for row, length in encoded.too_long]
    return encoded


def _without_early_prompt(
    tokens: np.ndarray, encoded: Encoded, max_length: int, bos: int | None, keeps_ending: bool
) -> np.ndarray:
    supervised = np.flatnonzero(encoded.labels[tokens] != IGNORE_INDEX)
    if not len(supervised):
        return tokens[:max_length]
    end = len(tokens) if keeps_ending else supervised[-1] + 1
    breaks = np.flatnonzero(np.diff(supervised) > 1)
    answer = supervised[breaks[-1] + 1] if len(breaks) else supervised[0]  # where the last answer begins
    head = tokens[:1] if bos is not None and encoded.ids[tokens[0]] == bos else tokens[:0]
    room = max_length - len(head)
    start = max(end - room, len(head))
    if start >= answer:
        # The answer alone is too long: keep one token before it, which predicts its first token, and truncate its end.
        encoded.notes["truncated"] += 1
        start = max(answer - 1, len(head))
    else:
        encoded.notes["prompt truncated"] += 1
    return np.concatenate([head, tokens[start : min(start + room, end)]])


def _without_unsupervised(encoded: Encoded) -> Encoded:
    keep = targets_of(encoded.labels, encoded.lengths) > 0
    if keep.all():
        return encoded
    encoded.notes["nothing supervised"] += int((~keep).sum())
    of_token = np.repeat(keep, encoded.lengths)
    encoded.ids, encoded.labels = encoded.ids[of_token], encoded.labels[of_token]
    encoded.rows, encoded.lengths = encoded.rows[keep], encoded.lengths[keep]
    return encoded
