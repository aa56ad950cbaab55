"""Tokenization of rows in batches with the fast tokenizer, in this process or in worker processes.

``Tokenization`` holds all settings that decide the tokens of a row; the token cache takes its
fingerprint from it.
"""

import gc
import multiprocessing
import os
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from ctypes import c_byte
from dataclasses import dataclass, fields
from datetime import date
from functools import cached_property
from itertools import chain
from typing import TypeVar

import numpy as np
from lit_callbacks.output.quantities import as_count
from transformers import PreTrainedTokenizerBase

from lit_ft.data.text.chat_template import ChatTemplate
from lit_ft.data.text.columns import PREFERENCE
from lit_ft.data.text.formats import (
    FORMATS,
    OF_PAIRS,
    OPEN,
    OPTIONS_COLUMN,
    PREFERENCES,
    THINKING_KEYS,
    Chat,
    Example,
    Pair,
    Text,
    Tokens,
    answers_of,
    hint_of_another_format,
    renamed,
    template_options_of,
    unread_columns,
    without_answer,
)
from lit_ft.data.text.placeholders import placeholder_in
from lit_ft.data.text.rendering import Piece, Supervise, chat_samples, text_pieces
from lit_ft.data.text.sources import RawRow
from lit_ft.data.tokens.segment_encoder import TextEncoder
from lit_ft.data.tokens.truncation import Encoded, Overlong, as_halves, fit_to_length, join_pairs
from lit_ft.data.worker_processes import leave_signals_to_parent
from lit_ft.errors import BadRow, RecipeError
from lit_ft.internals.executors import stop_feeding
from lit_ft.model.render_limits import limited
from lit_ft.packed_batch import IGNORE_INDEX

NOTES = {
    "truncated": "row: longer than data.max_length={max_length} tokens, truncated at the end "
    "(data.overlong={overlong})",
    "prompt truncated": "row: longer than data.max_length={max_length} tokens, without the beginning of the "
    "prompt now (data.overlong={overlong})",
    "dropped": "row: longer than data.max_length={max_length} tokens, dropped (data.overlong={overlong})",
    "continued": "row: raw text longer than data.max_length={max_length} tokens, goes on in further samples",
    "nothing supervised": "row: no supervised token left, dropped",
    "split": "answer: made a sample of its own, because {template} writes earlier turns otherwise than the last",
    "end of turn added": "answer: closed with {closing!r}, because {template} closes them with no special token",
    "other opening": "answer: begins in another way than {template} opens the assistant's turn at inference{openings}; "
    "trained as the template writes it",
    "thinking put back": "answer: begins with thinking that {template} leaves out of finished turns; trained with it, "
    "as it follows the prompt of inference, which opens it",
    "answer left out in part": "answer: without a part of what it says, because {template} leaves it out",
    "thinking left out": f"answer: has thinking ({', '.join(THINKING_KEYS)}) that {{template}} does not show, so it "
    "is not trained; write it into the content, or take it out",
    "without turns": "row: text without turns, on which data.system and data.supervise have no effect",
    "ends without answer": "conversation: ends with a turn that is not the assistant's; it was left out",
    "begins with answer": "conversation: begins with the assistant, whose first turn then answers nothing; remove that "
    "turn, or set train: false on it; text without questions is written as rows of text",
    "placeholders": "row: holds placeholders that nobody filled in, such as {{{{name}}}} or {{name}}; fill them in",
    "tools spelled out": "conversation: has functions, calls or results, which {template} does not show; "
    "spelled out as text",
    "dated": "conversation: holds the date of the day when it is tokenized, which {template} writes; the same on "
    "every day with data.template_options={{strftime_now: {today}}}",
    "options left out": f"row: has options in {OPTIONS_COLUMN!r} that {{template}} does not use; left out",
    "special tokens in text": "row: spells special tokens in its text, which are read as such",
    "without answer": f"row: without a known answer, and none is needed; {OPEN!r} stands in its place",
    "pair incomplete": "row: one of its answers was dropped or has no supervised token left, so the pair was left out",
    "answers equal": "row: both answers have the same tokens within data.max_length={max_length}, so the pair was left "
    "out",
}
"""What is counted, and what is said of each; names in braces are replaced by settings of the run."""
_OF_SAMPLES = ("truncated", "prompt truncated", "dropped", "nothing supervised")
"""Notes that count samples, of which a row gives one unless a template writes earlier turns otherwise."""
_COLUMN, _KEY = "column ", "key "
"""Beginnings of notes that name a column of rows, or a key of turns, that is not read."""
_NAMES_SHOWN = 8
"""Columns or keys that a message names."""


@dataclass
class Tokenization:
    """All settings that decide the tokens and labels of a row."""

    tokenizer: PreTrainedTokenizerBase
    """Tokenizer, with the ``chat_template`` to use."""
    format: str
    """A key of ``FORMATS``."""
    columns: dict[str, str] | None = None
    system: str | None = None
    supervise: Supervise = "assistant"
    max_length: int | None = None
    overlong: Overlong = "truncate"
    template_options: dict[str, object] | None = None
    takes_questions: bool = False
    """Whether a row may lack its answer, in whose place it then gets ``formats.OPEN``."""
    keeps_ending: bool = False
    """Whether a conversation ends as the template ends it, with what it writes behind the last answer's end of turn."""

    def __getstate__(self) -> dict[str, object]:
        # A compiled template cannot be pickled; each process compiles its own.
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @cached_property
    def template(self) -> ChatTemplate:
        """Chat template; only conversations need it."""
        return ChatTemplate(self.tokenizer, self.template_options)

    def template_of(self, chat: Chat) -> ChatTemplate:
        """Chat template with the options of a conversation that it uses, in place of the recipe's.

        Raises:
            BadRow: it does not render with them.
        """
        template = self.template
        options = {name: value for name, value in chat.options.items() if template.uses(name)}
        try:
            return template.with_options(options)
        except RecipeError as error:
            raise BadRow(f"with its {OPTIONS_COLUMN!r}: {error}") from error

    @cached_property
    def encoder(self) -> "TextEncoder":
        """Encoder of text pieces with the tokenizer."""
        return TextEncoder(self.tokenizer)

    @cached_property
    def opening(self) -> int | None:
        """Beginning-of-sequence id that the tokenizer puts before raw text; None if it adds none."""
        first = self.tokenizer("")["input_ids"][:1]
        return first[0] if first and first[0] == self.tokenizer.bos_token_id else None

    def describe(self, notes: Counter[str], rows: int) -> list[str]:
        """Messages for the notes, one line each."""
        closing = self.tokenizer.eos_token
        words = {"max_length": self.max_length, "overlong": self.overlong, "closing": closing, "today": date.today()}
        words["template"] = f"the chat template of {self.tokenizer.name_or_path!r}"
        words["openings"] = _openings(self.template) if notes["other opening"] else ""
        lines = []
        for name in filter(notes.__getitem__, NOTES):
            subject, rest = NOTES[name].format(**words).split(": ", 1)
            if name in _OF_SAMPLES:
                subject = "answer" if self.format in OF_PAIRS else "sample" if notes["split"] else subject
            # A row may have several answers or samples.
            is_of_rows = subject in ("answer", "sample")
            of = f"the {subject}s of {as_count(rows, 'row')}" if is_of_rows else as_count(rows, subject)
            lines.append(f"{notes[name]:,} of {of}: {rest}")
        for kind, what in (
            (_COLUMN, "columns that the model does not see"),
            (_KEY, f"keys of turns that {words['template']} does not use"),
        ):
            counts = [(name.removeprefix(kind), notes[name]) for name in sorted(notes) if name.startswith(kind)]
            named = [f"{name!r} (in {as_count(count, 'row')})" for name, count in counts]
            more = [f"{len(named) - _NAMES_SHOWN:,} more"] if len(named) > _NAMES_SHOWN else []
            lines += [f"{what}: {', '.join(named[:_NAMES_SHOWN] + more)}"] if named else []
        return lines

    def example(self, row: RawRow | BadRow) -> Example:
        """Convert a row to an example, with the system prompt of the settings where it has none.

        Raises:
            BadRow: the row does not follow its format.
        """
        if isinstance(row, BadRow):
            raise row
        row = renamed(row, self.columns)
        if self.takes_questions:
            row = without_answer(row, self.format) or row
        try:
            example = FORMATS[self.format].read(row)
        except BadRow as error:
            raise BadRow(f"{error}{hint_of_another_format(row, self.format)}") from error
        for one in answers_of(example):
            if isinstance(one, Chat):
                self._complete(one, row)
        return example

    def has_answer(self, row: RawRow) -> bool:
        """Whether a row has its answer; true of all rows unless ``takes_questions``."""
        return not self.takes_questions or without_answer(renamed(row, self.columns), self.format) is None

    def _complete(self, chat: Chat, row: RawRow) -> None:
        """Give a conversation the row's options for the template, and the settings' system prompt if it has none."""
        chat.options = template_options_of(row)
        if self.system and chat.messages[0]["role"] not in ("system", "developer"):
            chat.marks = {i + 1: mark for i, mark in chat.marks.items()}
            chat.messages = [{"role": "system", "content": self.system}, *chat.messages]

    def encode(self, rows: Sequence[RawRow | BadRow]) -> Encoded:
        """Tokenize a batch of rows."""
        bad: dict[int, str] = {}
        notes: Counter[str] = Counter()
        examples: dict[int, Example] = {}
        for i, row in enumerate(rows):
            try:
                examples[i] = self.example(row)
            except BadRow as error:
                bad[i] = str(error)
            else:
                assert not isinstance(row, BadRow), "example raises it"
                notes.update(_COLUMN + name for name in unread_columns(row, examples[i], self.format, self.columns))
                notes["without answer"] += not self.has_answer(row)
        noted: dict[int, list[str]] = {}
        encoded = (self._pairs if self.format in OF_PAIRS else self._samples)(examples, bad, noted)
        notes.update(chain.from_iterable(noted.values()))
        notes.update(encoded.notes)
        encoded.count, encoded.bad, encoded.notes = len(rows), sorted(bad.items()), notes
        return encoded

    def _pairs(self, pairs: dict[int, Example], bad: dict[int, str], noted: dict[int, list[str]]) -> Encoded:
        """Samples of a batch of pairs, whose conversations are tokenized as rows of their own, ``2 i`` and ``2 i + 1``.

        Arguments as in ``_samples``.
        """
        halves: dict[int, Example] = {}
        for i, pair in pairs.items():
            assert isinstance(pair, Pair), "the formats of pairs give nothing else"
            answers = enumerate((pair.chosen, pair.rejected))
            halves.update((2 * i + k, answer) for k, answer in answers if answer is not None)
        bad_halves: dict[int, str] = {}
        noted_halves: dict[int, list[str]] = {}
        samples = self._samples(halves, bad_halves, noted_halves)
        encoded = join_pairs(samples) if self.format == PREFERENCES else as_halves(samples)
        for half, problem in bad_halves.items():
            where = f"{PREFERENCE[half % 2]!r}: " if self.format == PREFERENCES else ""
            bad.setdefault(half // 2, f"{where}{problem}")
        good = pairs.keys() - bad.keys()
        noted.update((i, _noted_of_pair(noted_halves.get(2 * i, []), noted_halves.get(2 * i + 1, []))) for i in good)
        incomplete = len(good) - len(encoded.rows) - encoded.notes["answers equal"]
        if incomplete and self.format == PREFERENCES:
            encoded.notes["pair incomplete"] = incomplete
        return encoded

    def _samples(self, examples: dict[int, Example], bad: dict[int, str], noted: dict[int, list[str]]) -> Encoded:
        """Samples of a batch, within ``max_length``.

        Args:
            examples: examples by their row.
            bad: problems of rows that cannot be used, to which further ones are added.
            noted: filled with the names of ``NOTES`` that hold for a row.
        """
        if self.format == "tokenized":
            tokens = {i: example for i, example in examples.items() if isinstance(example, Tokens)}
            ids, labels, lengths, owners = self._tokens(tokens, bad)
            fully_supervised = {i for i in owners if tokens[i].ids == tokens[i].labels}
        else:
            with limited(f"the chat template of {self.tokenizer.name_or_path!r}"):
                pieces, owners = self._pieces(examples, bad, noted)
            ids, labels, lengths = self.encoder.encode(pieces)
            if self.opening is not None:
                is_text = np.array([isinstance(examples[i], Text) for i in owners], dtype=bool)
                ids, labels, lengths = _open(ids, labels, lengths, is_text, self.opening)
            fully_supervised = {i for i in owners if isinstance(example := examples[i], Text) and not example.prompt}
        rows = np.array(owners, dtype=np.int64)
        encoded = Encoded(ids, labels, np.array(lengths, dtype=np.int64), rows, len(examples))
        bos = self.tokenizer.bos_token_id
        return fit_to_length(encoded, self.max_length, self.overlong, fully_supervised, bos, self.keeps_ending)

    def _tokens(
        self, examples: dict[int, Tokens], bad: dict[int, str]
    ) -> tuple[np.ndarray, np.ndarray, list[int], list[int]]:
        """Samples of rows that hold token ids: concatenated ids and labels, tokens per sample, and row of each."""
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
        self, examples: dict[int, Example], bad: dict[int, str], noted_of: dict[int, list[str]]
    ) -> tuple[list[list[Piece]], list[int]]:
        """Samples of a batch as pieces of text, and the row of each sample."""
        closing = self.tokenizer.eos_token or ""
        samples: list[list[Piece]] = []
        owners: list[int] = []
        for i, example in examples.items():
            noted: list[str] = []  # dropped if the row is refused
            try:
                if isinstance(example, Chat):
                    noted += [_KEY + key for key in self.drop_unused_keys(example)]
                    how = self.supervise, closing, noted, self.keeps_ending
                    own = chat_samples(example, self.template_of(example), *how)
                    if not all(map(self.template.uses, example.options)):
                        noted.append("options left out")
                else:
                    own = [text_pieces(example, closing)]  # type: ignore[arg-type]
                    is_bare = self.format in ("prompt_completion", *OF_PAIRS)
                    if is_bare and (self.system or self.supervise != "assistant"):
                        noted.append("without turns")
                check_encodable(own)
                if self.format in OF_PAIRS and len(own) > 1:
                    raise BadRow(
                        f"{self.template.name} writes its earlier answers otherwise than the last, so that they make "
                        "several samples; compare the last answers alone, behind the same prompt"
                    )
            except BadRow as error:
                bad[i] = str(error)
                continue
            if not own:
                noted.append("nothing supervised")
            if isinstance(example, Chat) and begins_with_answer(example):
                noted.append("begins with answer")
            if any(map(placeholder_in, contents_of(example))):
                noted.append("placeholders")
            if any(map(self.encoder.has_special, contents_of(example))):
                noted.append("special tokens in text")
            if noted:
                noted_of[i] = noted
            samples += own
            owners += [i] * len(own)
        return samples, owners

    def drop_unused_keys(self, chat: Chat) -> list[str]:
        """Take the keys that the template does not use out of a conversation's turns, and return them.

        Turns without them render at once, several times as fast as by ``apply_chat_template``.
        """
        unused = [key for key in chat.other_keys if not self.template.uses(key)]
        for message in chat.messages if unused else []:
            for key in unused:
                message.pop(key, None)
        return unused


def _openings(template: ChatTemplate) -> str:
    """Text for a message where the template opens the assistant's turn differently at inference; empty if not."""
    expected, written = template.generation_prompt, template.opening
    return f" ({expected!r}, written is {written!r})" if expected != written else ""


def _open(
    ids: np.ndarray, labels: np.ndarray, lengths: list[int], is_text: np.ndarray, opening: int
) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Insert the token ``opening`` before each raw text that does not begin with it.

    As part of the text it could change the tokens after it.
    """
    tokens = np.array(lengths, dtype=np.int64)
    starts = np.cumsum(tokens) - tokens
    lacks = is_text & (np.append(ids, IGNORE_INDEX)[starts] != opening)
    starts = starts[lacks]
    return np.insert(ids, starts, opening), np.insert(labels, starts, IGNORE_INDEX), (tokens + lacks).tolist()


def begins_with_answer(chat: Chat) -> bool:
    """Whether an assistant turn that is supervised comes before any user turn."""
    first = next((i for i, one in enumerate(chat.messages) if one["role"] not in ("system", "developer")), None)
    return first is not None and chat.messages[first]["role"] == "assistant" and chat.marks.get(first) is not False


def _noted_of_pair(chosen: list[str], rejected: list[str]) -> list[str]:
    """Notes of a pair: what is said of rows and conversations once, what is said of answers as often as it holds."""
    of_answers = {name for name, text in NOTES.items() if text.startswith("answer: ") or name in _OF_SAMPLES}
    return chosen + [name for name in rejected if name in of_answers or name not in chosen]


def contents_of(example: Example) -> list[str]:
    """Texts of a row itself, without the text that a template adds."""
    if isinstance(example, Pair):
        return [text for answer in answers_of(example) for text in contents_of(answer)]
    if isinstance(example, Chat):
        return [message["content"] for message in example.messages]
    return [example.prompt, example.text] if isinstance(example, Text) else []


def check_encodable(samples: list[list[Piece]]) -> None:
    """Refuse text that UTF-8 cannot encode.

    Raises:
        BadRow: JSON escapes spell half of a surrogate pair.
    """
    for text, _ in chain(*samples):
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError as error:
                half = ord(error.object[error.start])
                raise BadRow(f"its text holds half of a surrogate pair (\\u{half:04x}); fix the text") from error


# --- many rows -------------------------------------------------------------------------------------

PlacedRow = tuple[int, str, RawRow | BadRow]
"""Source number, location (file and line) and row."""
Part = tuple[int, np.ndarray, Encoded]
"""Rows of a batch from one source: source number, positions in the batch, and samples."""

_tokenizations: Sequence[Tokenization]


def _start_worker(tokenizations: Sequence[Tokenization], is_over: c_byte, starter: int) -> None:
    global _tokenizations
    _tokenizations = tokenizations
    gc.freeze()  # objects of the parent need not be traversed in each collection
    leave_signals_to_parent(is_over, starter)


def _encode_in_worker(batch: list[tuple[int, RawRow | BadRow]]) -> list[Part]:
    return encode_batch(batch, _tokenizations)


def encode_batch(batch: Sequence[tuple[int, RawRow | BadRow]], tokenizations: Sequence[Tokenization]) -> list[Part]:
    """Tokenize pairs of a source number and a row, each with the tokenization of its source."""
    sources = np.array([source for source, _ in batch])
    return [
        (int(source), mine, tokenizations[int(source)].encode([batch[int(i)][1] for i in mine]))
        for source in np.unique(sources)
        for mine in [np.flatnonzero(sources == source)]
    ]


_Tag = TypeVar("_Tag")


def encode_batches(
    batches: Iterable[tuple[_Tag, list[PlacedRow]]], tokenizations: Sequence[Tokenization], workers: int, ahead: int = 0
) -> Iterator[tuple[_Tag, list[str], list[Part]]]:
    """Tokenize batches of rows, in order.

    Args:
        batches: pairs of a tag, which is returned with the result, and rows.
        tokenizations: tokenization of each source.
        workers: number of processes; 0 tokenizes in this process. The result does not depend on it.
        ahead: number of batches that are tokenized in advance, at least two per worker.

    Returns:
        Tag of each batch, locations of its rows, and their samples by source.
    """
    if workers < 1:
        for tag, batch in batches:
            locations = [location for _, location, _ in batch]
            yield tag, locations, encode_batch([(source, row) for source, _, row in batch], tokenizations)
        return
    # Not multiprocessing.Pool: it waits forever if a worker was killed.
    context = multiprocessing.get_context()
    is_over = context.RawValue("b", 0)  # an Event has a lock, which a killed worker may hold
    with ProcessPoolExecutor(workers, context, _start_worker, (tokenizations, is_over, os.getpid())) as pool:
        try:
            yield from _in_order(pool, batches, max(2 * workers, ahead))
        except BrokenProcessPool:
            is_over.value = 1  # the pool ends the others by SIGTERM, which they leave to their parent
            stop_feeding(pool)
            raise
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)  # otherwise waiting batches are tokenized first
            raise


def _in_order(
    pool: ProcessPoolExecutor, batches: Iterable[tuple[_Tag, list[PlacedRow]]], ahead: int
) -> Iterator[tuple[_Tag, list[str], list[Part]]]:
    waiting: deque[tuple[_Tag, list[str], Future[list[Part]]]] = deque()
    for tag, batch in batches:
        future = pool.submit(_encode_in_worker, [(source, row) for source, _, row in batch])
        waiting.append((tag, [location for _, location, _ in batch], future))
        if len(waiting) > ahead:
            tag, locations, future = waiting.popleft()
            yield tag, locations, future.result()
    while waiting:
        tag, locations, future = waiting.popleft()
        yield tag, locations, future.result()
