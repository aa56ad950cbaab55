"""Raw rows to messages: one function per data format.

A new format is a function here, an entry in ``FORMATS`` and a test.
"""

from collections.abc import Callable
from typing import Literal, TypedDict

from lit_ft.data.sources import RawRow
from lit_ft.errors import RecipeError


class Message(TypedDict):
    """One turn of a conversation, as Hugging Face chat templates take it."""

    role: Literal["system", "user", "assistant"]
    content: str


Conversation = list[Message] | str
"""Messages whose assistant turns are supervised, or plain text of which every token is."""


def alpaca(row: RawRow, place: str) -> list[Message]:
    """``instruction``, optional ``input`` and ``system``, and ``output``.

    A non-empty ``input`` follows the instruction after a newline, in the user turn.
    """
    instruction, answer = _text(row, "instruction", place), _text(row, "output", place)
    extra, system = _text(row, "input", place, required=False), _text(row, "system", place, required=False)
    if not instruction and not extra:
        raise RecipeError(f"{place}: 'instruction' is empty; the user turn needs text")
    if not answer:
        raise RecipeError(f"{place}: 'output' is empty; there is nothing to learn from this row, remove it")
    turns = [Message(role="system", content=system)] if system else []
    question = "\n".join(part for part in (instruction, extra) if part)
    return [*turns, Message(role="user", content=question), Message(role="assistant", content=answer)]


def completion(row: RawRow, place: str) -> str:
    """``text``: raw text, every token supervised, closed by the end-of-sequence token."""
    text = _text(row, "text", place)
    if not text:
        raise RecipeError(f"{place}: 'text' is empty; remove the row")
    return text


FORMATS: dict[str, Callable[[RawRow, str], Conversation]] = {"alpaca": alpaca, "completion": completion}
_COLUMNS = {"alpaca": {"instruction", "output"}, "completion": {"text"}}


def find_format(row: RawRow, path: str) -> str:
    """The format whose columns the row has.

    Raises:
        RecipeError: no format fits.
    """
    for name, columns in _COLUMNS.items():
        if columns & row.keys():
            return name
    needs = "; ".join(f"{name} needs {', '.join(sorted(columns))}" for name, columns in _COLUMNS.items())
    raise RecipeError(
        f"{path}, row 1: has the columns {', '.join(map(repr, sorted(row)))}, which no format knows ({needs}); "
        "rename the columns"
    )


def to_conversations(
    rows: list[RawRow], path: str, name: str = "auto", system: str | None = None
) -> list[Conversation]:
    """Turn a file's rows into conversations.

    Args:
        rows: as ``read_rows`` gives them.
        path: their file, for error messages.
        name: a key of ``FORMATS``, or ``auto`` to go by the columns of the first row.
        system: system prompt for conversations that bring none of their own.

    Raises:
        RecipeError: a row lacks a column or holds no text; it names the row.
    """
    convert = FORMATS[find_format(rows[0], path) if name == "auto" else name]
    conversations = [convert(row, f"{path}, row {number}") for number, row in enumerate(rows, 1)]
    if system is None:
        return conversations
    return [_with_system(conversation, system) for conversation in conversations]


def _with_system(conversation: Conversation, system: str) -> Conversation:
    if isinstance(conversation, str):
        raise RecipeError("data.system is set, but raw text (format completion) has no system turn; leave it out")
    if conversation[0]["role"] == "system":
        return conversation
    return [Message(role="system", content=system), *conversation]


def _text(row: RawRow, column: str, place: str, required: bool = True) -> str:
    value = row.get(column)
    if value is None and not required:
        return ""
    if value is None:
        raise RecipeError(f"{place}: has no {column!r}; each row needs it (columns here: {', '.join(row) or 'none'})")
    if not isinstance(value, str):
        raise RecipeError(f"{place}: {column!r} is a {type(value).__name__}; text is needed")
    return value
