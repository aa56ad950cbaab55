"""Items of a JSON list, parsed one at a time: such a file is often one line, and may be larger than memory."""

import codecs
import json
import re
from collections.abc import Iterator
from gzip import GzipFile
from pathlib import Path
from typing import IO

from lit_ft.errors import RecipeError

TO_UTF_8 = "convert the file to UTF-8 (from a Chinese Windows: iconv -f GB18030 -t UTF-8 FILE > NEW)"
"""What helps against another encoding."""
LONGEST_ROW_BYTES = 2**26
"""Maximum size of a row, 64 MiB: some 16 million tokens. What is longer is no row, but a file without its line ends."""
_CHUNK_BYTES = 2**20
_MARGIN = 16
"""Characters before the end of a chunk where an error may come from the rest that was not read yet."""
_SPACE = re.compile(r"[ \t\n\r]*")


def _with_unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    value = dict(pairs)
    if len(value) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} is there twice")
    return value


ROW_DECODER = json.JSONDecoder(object_pairs_hook=_with_unique_keys)
"""Decoder that raises ``ValueError`` for an object with a key twice, of which json's own takes the last value."""


def items_of_list(file: Path, stream: IO[bytes] | GzipFile) -> Iterator[object]:
    """Iterate over the items of the JSON list that a file holds, with memory for the longest item.

    Args:
        file: path, for messages.
        stream: its content in UTF-8, from the start; the first character that is no space is ``[``.

    Raises:
        RecipeError: the content is no UTF-8 or no JSON list, or an item is longer than ``LONGEST_ROW_BYTES``.
    """
    text = _Window(file, stream)
    text.next_character()
    text.position += 1
    number = 1
    while number > 1 or text.next_character() != "]":
        yield text.value(number)
        number += 1
        mark = text.next_character()
        if mark == "]":
            break
        if mark != ",":
            raise text.error("Expecting ',' delimiter", text.position)
        text.position += 1
    text.position += 1
    if text.next_character():
        raise text.error("Extra data", text.position)


class _Window:
    """Part of a file's text: what is not parsed yet, as far as it was read."""

    def __init__(self, file: Path, stream: IO[bytes] | GzipFile) -> None:
        self.position = 0
        self._file, self._stream = file, stream
        self._text = ""
        self._lines, self._columns = 0, 0  # before the text: line ends, and characters of the last line
        self._bytes = 0
        self._is_all = False
        self._decoder = codecs.getincrementaldecoder("utf-8")()

    def next_character(self) -> str:
        """Go to the next character that is no space, and return it; empty at the end of the file."""
        while True:
            match = _SPACE.match(self._text, self.position)
            assert match is not None
            self.position = match.end()
            if self.position < len(self._text) or not self._read_on():
                return self._text[self.position : self.position + 1]

    def value(self, number: int) -> object:
        """Parse the next value and go behind it."""
        self.next_character()
        while True:
            try:
                value, end = ROW_DECODER.raw_decode(self._text, self.position)
            except json.JSONDecodeError as error:
                is_cut = error.msg.startswith("Unterminated") or error.pos > len(self._text) - _MARGIN
                if not is_cut or not self._read_on(number):
                    raise self.error(error.msg, error.pos) from error
            except (ValueError, RecursionError) as error:
                raise RecipeError(
                    f"{self._file}, row {number}: is not JSON that can be read ({error}); fix it"
                ) from error
            else:
                if end < len(self._text) or not self._read_on(number):  # a number at the end may have further digits
                    self.position = end
                    return value

    def error(self, message: str, position: int) -> RecipeError:
        """Error at a position of the text, with line and column."""
        line, column = self._place(position)
        return RecipeError(f"{self._file}:{line + 1}: is not JSON (column {column + 1}: {message}); fix it")

    def _place(self, position: int) -> tuple[int, int]:
        """Number of line ends before a position, and of characters since the last of them."""
        start = self._text.rfind("\n", 0, position)
        lines = self._lines + self._text.count("\n", 0, position)
        return lines, position - start - 1 if start >= 0 else self._columns + position

    def _read_on(self, number: int = 0) -> bool:
        """Forget what is parsed and read more, twice as much for a long item; false at the end of the file."""
        rest = len(self._text) - self.position
        if rest > LONGEST_ROW_BYTES:
            raise RecipeError(
                f"{self._file}, row {number}: is longer than {LONGEST_ROW_BYTES // 2**20} MiB, which is no row to "
                "train on; split it"
            )
        chunk = b"" if self._is_all else self._stream.read(max(_CHUNK_BYTES, rest))
        if not chunk:
            self._decode(b"", is_last=True)
            self._is_all = True
            return False
        more = self._decode(chunk)
        self._lines, self._columns = self._place(self.position)
        self._text, self.position = self._text[self.position :] + more, 0
        return True

    def _decode(self, chunk: bytes, is_last: bool = False) -> str:
        begin = self._bytes - len(self._decoder.getstate()[0])
        self._bytes += len(chunk)
        try:
            return self._decoder.decode(chunk, final=is_last)
        except UnicodeDecodeError as error:
            line = self._lines + self._text.count("\n") + error.object.count(b"\n", 0, error.start) + 1
            raise RecipeError(f"{self._file}:{line}: is not UTF-8 (byte {begin + error.start}); {TO_UTF_8}") from error
