"""Rows to token ids and labels, in batches through the fast tokenizer, in worker processes.

``Tokenization`` says everything that decides what a row's tokens are; the token cache takes its
fingerprint from it.
"""

import gc
import multiprocessing
import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import chain
from typing import Any, Literal

import numpy as np
from transformers import PreTrainedTokenizerBase

from lit_ft.data.formats import FORMATS, Chat, Example, Text, renamed
from lit_ft.data.rendering import Piece, Supervise, chat_samples, text_pieces
from lit_ft.data.sources import RawRow
from lit_ft.data.templates import ChatTemplate
from lit_ft.errors import BadRow
from lit_ft.rows import IGNORE_INDEX

Overlong = Literal["truncate", "truncate_left_prompt", "drop", "error"]


@dataclass
class Encoded:
    """Samples of a batch of rows, laid end to end."""

    ids: np.ndarray
    """``(tokens,)``, int32."""
    labels: np.ndarray
    """``(tokens,)``, int32, unshifted; ``IGNORE_INDEX`` where not supervised."""
    lengths: np.ndarray
    """``(samples,)``, tokens per sample."""
    rows: np.ndarray
    """``(samples,)``: which row of the batch a sample comes from."""
    count: int
    """Rows of the batch."""
    bad: list[tuple[int, str]] = field(default_factory=list)
    """Rows that cannot be used, and what is wrong."""
    too_long: list[tuple[int, int]] = field(default_factory=list)
    """Rows over the limit, and their tokens, where that is an error."""
    notes: Counter[str] = field(default_factory=Counter)
    """What was done to rows, counted; the words are those of ``NOTES``."""


NOTES = {
    "truncated": "rows are longer than data.max_length={max_length} tokens and were cut at the end "
    "(data.overlong={overlong})",
    "prompt truncated": "rows are longer than data.max_length={max_length} tokens and lost the beginning of their "
    "prompt (data.overlong={overlong})",
    "dropped": "rows are longer than data.max_length={max_length} tokens and were dropped (data.overlong={overlong})",
    "continued": "rows of raw text are longer than data.max_length={max_length} tokens and go on in further samples",
    "nothing supervised": "rows had no supervised token left and were dropped",
    "split": "answers became samples of their own, because {template} writes earlier turns otherwise than the last",
    "end of turn added": "answers were closed with {closing!r}, because {template} closes them with no special token",
    "other opening": "answers begin in another way than {template} opens the assistant's turn at inference; they are "
    "trained as the template writes them",
    "answer left out in part": "answers lost part of what they say, because {template} leaves it out",
    "ends without answer": "conversations end with a turn that is not the assistant's; it was left out",
    "tools spelled out": "conversations have functions, calls or results, which {template} does not show; they were "
    "spelled out as text",
    "special tokens in text": "rows spell special tokens in their text, which are read as such",
}
"""What each note says, after a number; in braces, settings and names of the run."""


@dataclass
class Tokenization:
    """Everything that decides what a row's tokens and labels are."""

    tokenizer: PreTrainedTokenizerBase
    """Its ``chat_template`` is the one that is used."""
    format: str
    """A key of ``FORMATS``."""
    columns: dict[str, str] | None = None
    system: str | None = None
    supervise: Supervise = "assistant"
    max_length: int | None = None
    overlong: Overlong = "truncate"
    template_options: dict[str, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A compiled template cannot go to another process, which makes its own.
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @cached_property
    def template(self) -> ChatTemplate:
        """The chat template; asked for by conversations alone."""
        return ChatTemplate(self.tokenizer, self.template_options)

    @cached_property
    def encoder(self) -> "TextEncoder":
        """The tokenizer, as it is used here."""
        return TextEncoder(self.tokenizer)

    @cached_property
    def opening(self) -> int | None:
        """The token that the tokenizer opens raw text with, if it does."""
        first = self.tokenizer("")["input_ids"][:1]
        return first[0] if first and first[0] == self.tokenizer.bos_token_id else None

    def describe(self, notes: Counter[str], rows: int) -> list[str]:
        """The notes as lines."""
        closing = self.tokenizer.eos_token
        words = {"max_length": self.max_length, "overlong": self.overlong, "closing": closing}
        words["template"] = f"the chat template of {self.tokenizer.name_or_path!r}"
        return [f"{notes[name]:,} of {rows:,} {NOTES[name].format(**words)}" for name in NOTES if notes[name]]

    def example(self, row: RawRow | BadRow) -> Example:
        """What a row says.

        Raises:
            BadRow: it does not follow its format.
        """
        if isinstance(row, BadRow):
            raise row
        example = FORMATS[self.format].read(renamed(row, self.columns))
        if self.system and isinstance(example, Chat) and example.messages[0]["role"] not in ("system", "developer"):
            marks = {i + 1: mark for i, mark in example.marks.items()}
            return Chat([{"role": "system", "content": self.system}, *example.messages], example.tools, marks)
        return example

    def encode(self, rows: Sequence[RawRow | BadRow]) -> Encoded:
        """Tokenise a batch of rows."""
        bad: dict[int, str] = {}
        notes: Counter[str] = Counter()
        examples: dict[int, Example] = {}
        for i, row in enumerate(rows):
            try:
                examples[i] = self.example(row)
            except BadRow as error:
                bad[i] = str(error)
        if self.format == "tokenized":
            ids, labels, lengths, owners = self._tokens(examples, bad)
            whole = {i for i in owners if examples[i].ids == examples[i].labels}  # type: ignore[union-attr]
        else:
            pieces, owners = self._pieces(examples, bad, notes)
            ids, labels, lengths = self.encoder.encode(pieces)
            if self.opening is not None:
                is_text = np.array([isinstance(examples[i], Text) for i in owners], dtype=bool)
                ids, labels, lengths = _open(ids, labels, lengths, is_text, self.opening)
            whole = {i for i in owners if isinstance(example := examples[i], Text) and not example.prompt}
        encoded = Encoded(ids, labels, np.array(lengths, dtype=np.int64), np.array(owners, dtype=np.int64), len(rows))
        encoded.bad, encoded.notes = sorted(bad.items()), notes
        return fit_to_length(encoded, self.max_length, self.overlong, whole, self.tokenizer.bos_token_id)

    def _tokens(
        self, examples: dict[int, Any], bad: dict[int, str]
    ) -> tuple[np.ndarray, np.ndarray, list[int], list[int]]:
        """The rows that are tokens already: ids and labels end to end, tokens and row of each."""
        last = self.encoder.vocabulary - 1
        for i, example in examples.items():
            values = [*example.ids, *(label for label in example.labels if label != IGNORE_INDEX)]
            if values and not 0 <= min(values) <= max(values) <= last:
                bad[i] = (
                    f"its token ids reach from {min(values)} to {max(values)}; those of the tokenizer are 0 to {last}"
                )
        good = [i for i in examples if i not in bad]
        ids = np.fromiter(chain.from_iterable(examples[i].ids for i in good), dtype=np.int32)
        labels = np.fromiter(chain.from_iterable(examples[i].labels for i in good), dtype=np.int32)
        return ids, labels, [len(examples[i].ids) for i in good], good

    def _pieces(
        self, examples: dict[int, Example], bad: dict[int, str], notes: Counter[str]
    ) -> tuple[list[list[Piece]], list[int]]:
        """The text samples of a batch, and the row that each comes from."""
        closing = self.tokenizer.eos_token or ""
        samples: list[list[Piece]] = []
        owners: list[int] = []
        for i, example in examples.items():
            noted: list[str] = []  # of no account if the row is refused
            try:
                if isinstance(example, Chat):
                    own = chat_samples(example, self.template, self.supervise, closing, noted)
                else:
                    own = [text_pieces(example, closing)]  # type: ignore[arg-type]
                check_encodable(own)
            except BadRow as error:
                bad[i] = str(error)
                continue
            if not own:
                noted.append("nothing supervised")
            if any(map(self.encoder.has_special, contents_of(example))):
                noted.append("special tokens in text")
            if noted:
                notes.update(noted)
            samples += own
            owners += [i] * len(own)
        return samples, owners


def _open(
    ids: np.ndarray, labels: np.ndarray, lengths: list[int], is_text: np.ndarray, opening: int
) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Put a token in front of each text; as a part of the text, some tokenizers would go on from it differently."""
    tokens = np.array(lengths, dtype=np.int64)
    starts = (np.cumsum(tokens) - tokens)[is_text]
    return np.insert(ids, starts, opening), np.insert(labels, starts, IGNORE_INDEX), (tokens + is_text).tolist()


def contents_of(example: Example) -> list[str]:
    """What a row itself says, without what a template adds."""
    if isinstance(example, Chat):
        return [message["content"] for message in example.messages]
    return [example.prompt, example.text] if isinstance(example, Text) else []


def check_encodable(samples: list[list[Piece]]) -> None:
    """Refuse text that UTF-8 cannot hold.

    Raises:
        BadRow: JSON escapes spell half of a surrogate pair.
    """
    for text, _ in chain(*samples):
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError as error:
                half = ord(error.object[error.start])
                raise BadRow(f"its text holds half of a surrogate pair (\\u{half:04x}); mend the text") from error


# --- text to ids -----------------------------------------------------------------------------------


class TextEncoder:
    """Pieces of text to ids.

    Most tokenizers encode a text piece by piece as they do at inference. Those of the SentencePiece
    kind write a space before each piece; their texts are encoded whole, and offsets say whose a token is.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Look at a tokenizer; its padding and truncation are switched off.

        Args:
            tokenizer: a fast one.
        """
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self.vocabulary = max(tokenizer.get_vocab().values()) + 1
        """Token ids reach up to it; some may be unused."""
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
        """Whether some of the text would be read as a special token."""
        return self._special.search(text) is not None

    def _encode(self, texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._backend.encode_batch_fast(texts, add_special_tokens=False)]

    def encode(self, samples: Sequence[Sequence[Piece]]) -> tuple[np.ndarray, np.ndarray, list[int]]:
        """Ids and labels of all samples, end to end, and the tokens of each."""
        ids, flags, lengths = (self._by_piece if self.is_piecewise else self._by_offset)(samples)
        flat = np.array(ids, dtype=np.int32)
        return flat, np.where(np.array(flags, dtype=bool), flat, np.int32(IGNORE_INDEX)), lengths

    def _by_piece(self, samples: Sequence[Sequence[Piece]]) -> tuple[list[int], np.ndarray, list[int]]:
        # Special tokens stand alone in any text, and what stands between them is often the same: encode it once.
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
        # All texts end to end, each with one character more: a token of no character may be at the end.
        pieces = [piece for sample in samples for piece in (*sample, ("\0", False))]
        flags = np.array([flag for _, flag in pieces], dtype=bool)
        of_character = np.repeat(flags, np.array([len(text) for text, _ in pieces], dtype=np.int64))
        begins = np.cumsum([0, *(len(text) + 1 for text in texts)])[:-1]
        offsets = chain.from_iterable(chain.from_iterable(encoding.offsets for encoding in encodings))
        starts, ends = np.fromiter(offsets, np.int64).reshape(-1, 2).T + np.repeat(begins, lengths)
        # A word that takes in the space before an answer is of the answer. A special token that takes in the space
        # behind it is where it starts: it ends an answer, or opens its turn.
        at_end = of_character[np.maximum(ends - 1, starts)]
        if self._right_stripping:
            at_end &= ~np.isin(flat, self._right_stripping)
        return flat, of_character[starts] | at_end, lengths


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    pattern = "|".join(map(re.escape, sorted(texts, key=len, reverse=True)))
    return re.compile(f"({pattern})" if pattern else "((?!))")


# --- length ----------------------------------------------------------------------------------------


def fit_to_length(
    encoded: Encoded, max_length: int | None, overlong: Overlong, whole: set[int], bos: int | None
) -> Encoded:
    """Apply ``max_length``, and leave out samples that teach nothing.

    Args:
        encoded: samples of any length; changed in place and returned.
        max_length: most tokens of a sample; None for no limit.
        overlong: what happens to longer ones.
        whole: rows of which every token is supervised; these go on in further samples where others are cut.
        bos: id of the token that stays in front of a prompt that loses its beginning.
    """
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
        elif row in whole:
            notes["continued"] += 1
            # A sample's first token is never a target: the next one begins with the last of the one before.
            step = max(max_length - 1, 1)
            spans += [(row, tokens[at : at + max_length]) for at in range(0, len(tokens) - 1, step)]
        elif overlong == "truncate":
            notes["truncated"] += 1
            spans.append((row, tokens[:max_length]))
        else:
            spans.append((row, _without_early_prompt(tokens, encoded, max_length, bos)))
    if is_long.any():
        kept = [(int(encoded.rows[k]), np.arange(starts[k], starts[k + 1])) for k in np.flatnonzero(~is_long)]
        kept = sorted([*kept, *spans], key=lambda span: span[0])
        order = np.concatenate([tokens for _, tokens in kept] or [np.zeros(0, dtype=np.int64)])
        encoded.ids, encoded.labels = encoded.ids[order], encoded.labels[order]
        encoded.rows = np.array([row for row, _ in kept], dtype=np.int64)
        encoded.lengths = np.array([len(tokens) for _, tokens in kept], dtype=np.int64)
    return _without_unsupervised(encoded)


def _without_early_prompt(tokens: np.ndarray, encoded: Encoded, max_length: int, bos: int | None) -> np.ndarray:
    supervised = np.flatnonzero(encoded.labels[tokens] != IGNORE_INDEX)
    if not len(supervised):
        return tokens[:max_length]
    end = supervised[-1] + 1
    breaks = np.flatnonzero(np.diff(supervised) > 1)
    answer = supervised[breaks[-1] + 1] if len(breaks) else supervised[0]  # where the last answer begins
    head = tokens[:1] if bos is not None and encoded.ids[tokens[0]] == bos else tokens[:0]
    room = max_length - len(head)
    start = max(end - room, len(head))
    if start >= answer:
        # The answer alone is too long: it keeps one token to be predicted from, and loses its end.
        encoded.notes["truncated"] += 1
        start = max(answer - 1, len(head))
    else:
        encoded.notes["prompt truncated"] += 1
    return np.concatenate([head, tokens[start : min(start + room, end)]])


def _without_unsupervised(encoded: Encoded) -> Encoded:
    starts = np.concatenate([[0], np.cumsum(encoded.lengths)]).astype(np.int64)
    is_target = encoded.labels != IGNORE_INDEX
    is_target[starts[:-1][encoded.lengths > 0]] = False
    counts = np.diff(np.concatenate([[0], np.cumsum(is_target)])[starts])
    if counts.all():
        return encoded
    keep = counts > 0
    encoded.notes["nothing supervised"] += int((~keep).sum())
    of_token = np.repeat(keep, encoded.lengths)
    encoded.ids, encoded.labels = encoded.ids[of_token], encoded.labels[of_token]
    encoded.rows, encoded.lengths = encoded.rows[keep], encoded.lengths[keep]
    return encoded


# --- many rows -------------------------------------------------------------------------------------

PlacedRow = tuple[int, str, RawRow | BadRow]
"""Number of its source, file and line, and the row."""
Part = tuple[int, np.ndarray, Encoded]
"""Rows of a batch that share a source: its number, their positions in the batch, their samples."""

_tokenizations: Sequence[Tokenization]


def _start_worker(tokenizations: Sequence[Tokenization]) -> None:
    global _tokenizations
    _tokenizations = tokenizations
    gc.freeze()  # what the parent had is not searched for garbage again and again


def _encode_in_worker(batch: list[tuple[int, RawRow | BadRow]]) -> list[Part]:
    return encode_batch(batch, _tokenizations)


def encode_batch(batch: Sequence[tuple[int, RawRow | BadRow]], tokenizations: Sequence[Tokenization]) -> list[Part]:
    """Tokenise rows, each with the number of its source, as the sources want it."""
    sources = np.array([source for source, _ in batch])
    return [
        (int(source), mine, tokenizations[int(source)].encode([batch[int(i)][1] for i in mine]))
        for source in np.unique(sources)
        for mine in [np.flatnonzero(sources == source)]
    ]


def encode_batches(
    batches: Iterable[tuple[Any, list[PlacedRow]]], tokenizations: Sequence[Tokenization], workers: int, ahead: int = 0
) -> Iterator[tuple[Any, list[str], list[Part]]]:
    """Tokenise batches of rows, in order.

    Args:
        batches: each with a tag that comes back with it.
        tokenizations: how, for each source.
        workers: processes; 0 does it in this one. The result does not depend on it.
        ahead: batches that are tokenised before they are asked for, at least two per worker.

    Returns:
        For each batch its tag, the places of its rows, and their samples by source.
    """
    if workers < 1:
        for tag, batch in batches:
            yield tag, [place for _, place, _ in batch], encode_batch([(s, row) for s, _, row in batch], tokenizations)
        return
    # Not multiprocessing.Pool: that waits for ever where a worker was killed.
    with ProcessPoolExecutor(workers, multiprocessing.get_context(), _start_worker, (tokenizations,)) as pool:
        waiting: deque[tuple[Any, list[str], Future[list[Part]]]] = deque()
        for tag, batch in batches:
            future = pool.submit(_encode_in_worker, [(source, row) for source, _, row in batch])
            waiting.append((tag, [place for _, place, _ in batch], future))
            if len(waiting) > max(2 * workers, ahead):
                tag, places, future = waiting.popleft()
                yield tag, places, future.result()
        while waiting:
            tag, places, future = waiting.popleft()
            yield tag, places, future.result()
