"""Encoding of pieces of text to token ids and labels."""

import re
from collections.abc import Iterable, Sequence
from itertools import chain, groupby
from operator import itemgetter
from os.path import commonprefix

import numpy as np
from transformers import PreTrainedTokenizerBase

from lit_ft.data.text.rendering import Piece
from lit_ft.packed_batch import IGNORE_INDEX


class TextEncoder:
    """Encoder of pieces of text.

    Most tokenizers encode each piece separately, as at inference. SentencePiece tokenizers add a space before each
    piece; with them the full text is encoded, and character offsets assign each token to a piece.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Switch off the tokenizer's padding and truncation, for all its users, and find its special tokens."""
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self.vocabulary = max(tokenizer.get_vocab().values()) + 1
        """Highest token id plus 1; some ids may be unused."""
        special = {id_: token for id_, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._special = _any_of(token.content for token in special.values())
        self._ids = {
            token.content: id_
            for id_, token in special.items()
            if not (token.lstrip or token.rstrip or token.single_word)
        }
        self._alone = _any_of(self._ids)
        self._right_stripping = [id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.rstrip]
        two = [self._encode([text])[0] for text in ("one\n", "two")]
        self.is_piecewise = bool(tokenizer.decode([*two[0], *two[1]]) == "one\ntwo")

    def has_special(self, text: str) -> bool:
        """Whether part of the text would be encoded as a special token."""
        return self._special.search(text) is not None

    def _encode(self, texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._backend.encode_batch_fast(texts, add_special_tokens=False)]

    def encode(self, samples: Sequence[Sequence[Piece]]) -> tuple[np.ndarray, np.ndarray, list[int]]:
        """Encode samples; return their concatenated ids and labels, ``(tokens,)``, int32, and the tokens per sample."""
        ids, flags, lengths = (self._by_piece if self.is_piecewise else self._by_offset)(samples)
        flat = np.array(ids, dtype=np.int32)
        return flat, np.where(np.array(flags, dtype=bool), flat, np.int32(IGNORE_INDEX)), lengths

    def _by_piece(self, samples: Sequence[Sequence[Piece]]) -> tuple[list[int], np.ndarray, list[int]]:
        # Special tokens are never merged with other text, and the text between them often repeats: encode it once.
        parts = [[self._alone.split(text) for text, _ in sample] for sample in samples]
        known: dict[str, list[int]] = {"": []}
        known.update((token, [id_]) for token, id_ in self._ids.items())
        new = list({part: None for sample in parts for piece in sample for part in piece if part not in known})
        known.update(zip(new, self._encode(new), strict=True))
        ids: list[int] = []
        ends, lengths = [], []
        for sample in parts:
            start = len(ids)
            for piece in sample:
                for part in piece:
                    ids += known[part]
                ends.append(len(ids))
            lengths.append(len(ids) - start)
        flags = np.array([flag for sample in samples for _, flag in sample], dtype=bool)
        return ids, np.repeat(flags, np.diff([0, *ends])), lengths

    def _by_offset(self, samples: Sequence[Sequence[Piece]]) -> tuple[list[int], np.ndarray, list[int]]:
        texts = ["".join(text for text, _ in sample) for sample in samples]
        encodings = self._backend.encode_batch(texts, add_special_tokens=False)
        ids = [encoding.ids for encoding in encodings]
        lengths = list(map(len, ids))
        flat = list(chain.from_iterable(ids))
        # All texts concatenated, each with one extra character: a token without characters may be at the end.
        pieces = [piece for sample in samples for piece in (*sample, ("\0", False))]
        flags = np.array([flag for _, flag in pieces], dtype=bool)
        of_character = np.repeat(flags, np.array([len(text) for text, _ in pieces], dtype=np.int64))
        begins = np.cumsum([0, *(len(text) + 1 for text in texts)])[:-1]
        offsets = chain.from_iterable(chain.from_iterable(encoding.offsets for encoding in encodings))
        starts, ends = np.fromiter(offsets, np.int64).reshape(-1, 2).T + np.repeat(begins, lengths)
        # A token that includes the space before an answer belongs to the answer. A special token that includes the
        # space after it belongs to the piece where it starts: it ends an answer, or opens its turn.
        at_end = of_character[np.maximum(ends - 1, starts)]
        if self._right_stripping:
            at_end &= ~np.isin(flat, self._right_stripping)
        return flat, of_character[starts] | at_end, lengths


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Pattern of one group, the longest of some texts that is there."""
    pattern = _branches(sorted(filter(None, set(texts))))
    return re.compile(f"({pattern})" if pattern else "((?!))")


def _branches(texts: list[str]) -> str:
    """Pattern of sorted texts that branches where they part: of a plain list, ``re`` would try each at each place."""
    if len(texts) < 2:
        return "".join(map(re.escape, texts))
    start = commonprefix(texts)  # noqa: RUF071 (a prefix of characters, not of path parts)
    rest = [text[len(start) :] for text in texts]
    ends_here = not rest[0]
    branches = [_branches(list(group)) for _, group in groupby(rest[ends_here:], key=itemgetter(0))]
    return f"{re.escape(start)}(?:{'|'.join(branches)}){'?' * ends_here}"
