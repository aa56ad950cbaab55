"""Conversion of raw rows to examples: one function per data format.

A new format needs a function here, an entry in ``FORMATS`` and a test. A function raises ``BadRow`` with
the problem and the expected value; its caller adds the file and the line.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lit_callbacks.protocols import Message

from lit_ft.data.text.columns import JUDGMENTS, PREFERENCE, as_option, refuse_preferences, suggested_columns
from lit_ft.data.text.preferences import REJECTED_TEXT, Turns, comparison_of, judgment_of
from lit_ft.data.text.sources import RawRow
from lit_ft.errors import BadRow
from lit_ft.packed_batch import IGNORE_INDEX

JsonObject = dict[str, Any]
"""Object of JSON data, e.g. the schema of a function."""


THINKING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Keys of a message that hold the assistant's thinking before its answer."""


@dataclass
class Chat:
    """A conversation."""

    messages: list[Message]
    tools: list[JsonObject] | None = None
    """JSON schemas of the functions that may be called."""
    marks: dict[int, bool] = field(default_factory=dict)
    """Turns that the row marks as supervised or unsupervised, by their index."""
    options: JsonObject = field(default_factory=dict)
    """Variables for the chat template that the row gives, beside those of the recipe."""
    other_keys: set[str] = field(default_factory=set)
    """Further keys of turns, which only a template may use."""


@dataclass
class Text:
    """Raw text, closed by the end-of-sequence token."""

    text: str
    """Supervised text."""
    prompt: str = ""
    """Unsupervised text before it."""


@dataclass
class Tokens:
    """Token ids that a row holds itself."""

    ids: list[int]
    labels: list[int]
    """Unshifted; ``IGNORE_INDEX`` where not supervised."""


@dataclass
class Pair:
    """Two answers to one prompt, the first of which is the better one; one is None where answers are unpaired."""

    chosen: Chat | Text | None
    rejected: Chat | Text | None
    columns: frozenset[str] = frozenset()
    """Columns that hold the prompt, and of an unpaired answer all that its row is read from."""


Example = Chat | Text | Tokens | Pair


def answers_of(example: Example) -> Sequence[Chat | Text | Tokens]:
    """Answers that a pair has; an example of another kind itself."""
    if not isinstance(example, Pair):
        return (example,)
    return [answer for answer in (example.chosen, example.rejected) if answer is not None]


def good_answer_of(example: Example) -> Chat | Text | Tokens | None:
    """Answer that is to be expected of a model: the chosen one of a pair; None where a row has a bad one alone."""
    return example.chosen if isinstance(example, Pair) else example


OPTIONS_COLUMN = "chat_template_kwargs"
"""Column of a conversation's own variables for the chat template, as TRL and vLLM name it."""


def template_options_of(row: RawRow) -> JsonObject:
    """Variables for the chat template that a row gives; those without a value are left out."""
    value = row.get(OPTIONS_COLUMN)
    if isinstance(value, str) and value.strip():
        value = _json(value, repr(OPTIONS_COLUMN))
    if value in (None, ""):
        return {}
    if not isinstance(value, Mapping):
        raise BadRow(f"{OPTIONS_COLUMN!r} is {_kind(value)}; an object is needed, e.g. {{'enable_thinking': false}}")
    return {str(name): part for name, part in value.items() if part is not None}


# --- the formats -----------------------------------------------------------------------------------


def alpaca(row: RawRow) -> Chat:
    """Read ``instruction`` and ``output``; optional ``input``, ``history`` (pairs), ``system``, ``tools``.

    A non-empty ``input`` follows the instruction after a newline, in the user turn.
    """
    question = "\n".join(part for part in (_text(row, "instruction"), _text(row, "input", required=False)) if part)
    answer = _text(row, "output")
    if not question:
        raise BadRow("'instruction' is empty; the user turn needs text")
    if not answer:
        raise BadRow("'output' is empty; there is nothing to learn from this row, remove it")
    chat = _begun(row)
    for number, pair in enumerate(_list(row, "history", required=False), 1):
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
            raise BadRow(f"'history' item {number} is {_kind(pair)}; a pair [question, answer] is needed")
        chat.messages += _turn(*(_string(part, f"'history' item {number}", empty=False) for part in pair))
    chat.messages += _turn(question, answer)
    return chat


def sharegpt(row: RawRow) -> Chat:
    """Read ``conversations`` of ``from`` and ``value``; optional ``system``, ``tools``.

    ``from``: human, gpt, system, function_call (value: JSON with name and arguments, or a list of these; thinking in
    <think> may be before it), observation.
    """
    turns: list[object] = []
    for number, turn in enumerate(_list(row, "conversations"), 1):
        where = f"'conversations' item {number}"
        if not isinstance(turn, Mapping):
            raise BadRow(f"{where} is {_kind(turn)}; an object with 'from' and 'value' is needed")
        name = _string(turn.get("from"), f"{where}: 'from'")
        if name not in _SHAREGPT_ROLES:
            advice = _meant({"user": "human", "assistant": "gpt"}, name)
            raise BadRow(f"{where}: 'from' is {_shown(name)}; {advice}known are {', '.join(_SHAREGPT_ROLES)}")
        text = _string(turn.get("value"), f"{where}: 'value'")
        more = {key: value for key, value in turn.items() if key not in ("from", "value")}
        turns.append({**more, "role": name, "content": text})
    return _chat(turns, row, "conversations")


_SHAREGPT_ROLES = (
    "human",
    "user",
    "gpt",
    "assistant",
    "system",
    "function_call",
    "observation",
    "tool",
    "tool_call",
    "tool_response",
)


def messages(row: RawRow, may_be_empty: bool = False) -> Chat:
    """Read ``messages`` in OpenAI's form: ``role``, ``content``, ``tool_calls``; optional ``system``, ``tools``, marks.

    ``train: false``, ``weight: 0`` or ``loss: false`` leaves an assistant turn unsupervised, ``train: true`` supervises
    any turn. Names of roles that other trainers read are taken too; a turn of role ``tool_call`` holds a call as JSON.

    Args:
        row: the row.
        may_be_empty: whether turns may have no text, as in a conversation that nothing learns from.
    """
    return _chat(_list(row, "messages"), row, "messages", may_be_empty)


def completion(row: RawRow) -> Text:
    """Read ``text``: every token is supervised, and the end-of-sequence token is appended."""
    return Text(_text(row, "text", empty=False))


def prompt_completion(row: RawRow) -> Text | Chat:
    """Read ``prompt`` and ``completion``: two texts, or two lists of messages; the completion is supervised."""
    prompt, answer = row.get("prompt"), row.get("completion")
    if isinstance(prompt, list) and isinstance(answer, list):
        return _chat([*prompt, *answer], row, "prompt and completion", of_prompt=len(prompt))
    return Text(_text(row, "completion", empty=False), _text(row, "prompt", empty=False))


def preference(row: RawRow) -> Pair:
    """Read ``chosen`` and ``rejected``: two answers to one prompt, of which nothing is learnt itself.

    The prompt is ``prompt`` (text, or messages), ``instruction`` with its companions as in ``alpaca``, ``messages`` or
    ``conversations`` that end before the answer, or the turns that two whole conversations begin with. Optional
    ``system``, ``tools``.
    """
    in_json = {
        name: _list(row, name, False) for name in ("messages", "conversations") if isinstance(row.get(name), str)
    }
    prompt, *answers, columns = comparison_of({**row, **in_json})
    chosen, rejected = (_answered(row, prompt, *one) for one in zip(answers, PREFERENCE, strict=True))
    if chosen == rejected:
        raise BadRow("'chosen' and 'rejected' are equal, so there is nothing to compare; remove the row")
    return Pair(chosen, rejected, columns)


def unpaired_preference(row: RawRow) -> Pair:
    """Read an answer and ``label`` (or ``kto_tag``): whether it is a good one. Nothing is learnt from it itself.

    Prompt and answer are in the columns of ``messages``, ``sharegpt``, ``alpaca`` or ``prompt_completion``; only the
    last answer of a conversation counts.
    """
    column, is_good = judgment_of(row)
    form = next((name for name in _CONVERSATIONS if FORMATS[name].columns <= row.keys()), None)
    if form is None:
        found = ", ".join(repr(name) for name in row if name != column) or "none"
        raise BadRow(
            f"has no answer that {column!r} could judge; give 'prompt' and 'completion', 'messages', 'conversations', "
            f"or 'instruction' and 'output' (columns here: {found})"
        )
    answer = FORMATS[form].read(row)
    if isinstance(answer, Chat):
        roles = [message["role"] for message in answer.messages]
        before = next((i for i in reversed(range(len(roles))) if roles[i] == "user"), -1)
        if "assistant" not in roles[before + 1 :]:
            raise BadRow(f"ends without an answer that {column!r} could judge; end it with the assistant's turn")
        answer.marks = {i: False for i in range(before) if roles[i] == "assistant"}
    elif isinstance(answer, Text) and not answer.prompt:
        raise BadRow("'prompt' is empty; an answer is compared with others to the same prompt, which needs text")
    assert isinstance(answer, Chat | Text), "the formats of conversations give nothing else"
    columns = FORMATS[form].columns | FORMATS[form].optional | {column}
    return Pair(answer, None, columns) if is_good else Pair(None, answer, columns)


def _answered(row: RawRow, prompt: Turns | str | None, answer: Turns | str, name: str) -> Chat | Text:
    """Prompt with an answer, the value of the column ``name``, which alone is supervised."""
    if isinstance(prompt, str):
        return Text(str(answer), prompt)
    if prompt is None:
        chat = alpaca({**row, "output": answer})
        chat.marks = {i: False for i, one in enumerate(chat.messages[:-1]) if one["role"] == "assistant"}
        return chat
    if not isinstance(turn := answer[0], Mapping) or turn.get("role") not in ANSWERS:
        kind = f"of role {_shown(turn.get('role'))}" if isinstance(turn, Mapping) else f"that is {_kind(turn)}"
        raise BadRow(
            f"{name!r} has a turn {kind} after the prompt that both answers have; an answer begins with the "
            "assistant's turn"
        )
    chat = _chat([*prompt, *answer], row, f"prompt and {name}", of_prompt=len(prompt))
    # A question that the row marks is the same in both, so there is nothing to compare.
    chat.marks = {i: mark for i, mark in chat.marks.items() if chat.messages[i]["role"] == "assistant"}
    return chat


def tokenized(row: RawRow) -> Tokens:
    """Read ``input_ids``, unchanged; optional ``labels`` (-100 where not supervised) or a mask (1 where supervised).

    Positions where an ``attention_mask`` is 0 are padding and are left out.
    """
    ids = _integers(row, "input_ids")
    if not ids:
        raise BadRow("'input_ids' is empty; remove the row")
    labels = list(ids)
    for column in ("labels", *_TOKEN_MASKS):
        if row.get(column) is None:
            continue
        values = _integers(row, column, may_be_bool=column != "labels")
        if len(values) != len(ids):
            raise BadRow(f"{column!r} has {len(values)} items for {len(ids)} 'input_ids'; one each is needed")
        if column != "labels" and not set(values) <= {0, 1}:
            raise BadRow(f"{column!r} holds other values than 0 and 1; it must be 1 where a token is supervised")
        labels = (
            values if column == "labels" else [i if keep else IGNORE_INDEX for i, keep in zip(ids, values, strict=True)]
        )
        break
    if row.get("attention_mask") is not None:
        real = _integers(row, "attention_mask", may_be_bool=True)
        if len(real) != len(ids):
            raise BadRow(f"'attention_mask' has {len(real)} items for {len(ids)} 'input_ids'; one each is needed")
        if not set(real) <= {0, 1}:
            raise BadRow("'attention_mask' holds other values than 0 and 1; it must be 0 where a token is padding")
        if not any(real):
            raise BadRow("'attention_mask' is 0 everywhere; remove the row")
        ids, labels = ([v for v, keep in zip(values, real, strict=True) if keep] for values in (ids, labels))
    if ids != labels and _are_shifted(ids, labels):
        raise BadRow(
            "'labels' are shifted: each is the next position's token; give each position its own, as labels are "
            "shifted in training"
        )
    return Tokens(ids, labels)


def _are_shifted(ids: list[int], labels: list[int]) -> bool:
    """Whether labels are the tokens after theirs and not their own, wherever there are labels and tokens after."""
    pairs = [(i, label) for i, label in enumerate(labels[:-1]) if label != IGNORE_INDEX]
    return any(label != ids[i] for i, label in pairs) and all(label == ids[i + 1] for i, label in pairs)


_TOKEN_MASKS = ("loss_mask", "completion_mask", "assistant_masks")


class Format(NamedTuple):
    """Reader of a format, the columns that identify it, and further ones that it reads."""

    read: Callable[[RawRow], Example]
    columns: frozenset[str]
    optional: frozenset[str] = frozenset()


_OF_CHATS = frozenset({"system", "tools", "functions", OPTIONS_COLUMN})
"""Columns that every format of conversations reads."""

PREFERENCES, UNPAIRED = "preference", "unpaired_preference"
OF_PAIRS = frozenset({PREFERENCES, UNPAIRED})
"""Formats whose rows are pairs, of which the second has one answer of each."""

FORMATS: dict[str, Format] = {
    "tokenized": Format(tokenized, frozenset({"input_ids"}), frozenset({"labels", *_TOKEN_MASKS, "attention_mask"})),
    "messages": Format(messages, frozenset({"messages"})),
    "sharegpt": Format(sharegpt, frozenset({"conversations"})),
    "alpaca": Format(alpaca, frozenset({"instruction", "output"}), frozenset({"input", "history"})),
    "prompt_completion": Format(prompt_completion, frozenset({"prompt", "completion"})),
    "completion": Format(completion, frozenset({"text"})),
    PREFERENCES: Format(
        preference,
        frozenset(PREFERENCE),
        frozenset({"prompt", "messages", "conversations", "instruction", "input", "history", REJECTED_TEXT}),
    ),
    UNPAIRED: Format(unpaired_preference, frozenset(), frozenset(JUDGMENTS)),
}
_CONVERSATIONS = ("messages", "sharegpt", "alpaca", "prompt_completion")
FOUND_BY_COLUMNS = [name for name in FORMATS if name not in OF_PAIRS]
"""Formats that ``auto`` finds: both answers of preference data train only where that is asked for."""
EMPTY: tuple[object, ...] = (None, "", [], {})
"""Values that say nothing."""


def columns_of(form: str) -> list[str]:
    """Columns that a format reads, those that it needs first."""
    needed, optional = FORMATS[form].columns, FORMATS[form].optional
    if form == UNPAIRED:
        optional |= {column for name in _CONVERSATIONS for column in FORMATS[name].columns | FORMATS[name].optional}
    if form not in ("completion", "tokenized"):
        optional |= _OF_CHATS
    return sorted(needed) + sorted(optional)


def unread_columns(row: RawRow, example: Example, form: str, columns: Mapping[str, str] | None) -> list[str]:
    """Columns of a row with a value that its format does not read; ``id`` names a row in ``predict``."""
    theirs = columns or {}
    known = FORMATS[form].columns | {"id"}
    known |= example.columns if isinstance(example, Pair) else FORMATS[form].optional
    known |= {REJECTED_TEXT} if form == PREFERENCES else set()
    known |= _OF_CHATS if isinstance(answers_of(example)[0], Chat) else set()
    known = known - theirs.keys() | set(theirs.values())
    return [name for name in row if name not in known and row[name] not in EMPTY]


OPEN = "?"
"""Stands for a missing answer, so that the readers of training rows read a question too; no prompt depends on it."""
_TURNS_OF = {
    "messages": ("messages", "role", "content"),
    "sharegpt": ("conversations", "from", "value"),
}
"""By format: column of the turns, and keys of a turn's role and text."""


def without_answer(row: RawRow, form: str) -> RawRow | None:
    """A row that has no answer, with one put in its place; None for a row that has one."""
    if form == "alpaca":
        return {**row, "output": OPEN} if _is_empty(row.get("output")) else None
    if form == PREFERENCES:
        has_answer = not _is_empty(row.get("chosen")) or row.get(REJECTED_TEXT) is not None
        return None if has_answer else {**row, "chosen": OPEN, "rejected": OPEN + OPEN}
    if form == UNPAIRED:
        by_column = {"messages": "messages", "conversations": "sharegpt", "instruction": "alpaca"}
        found = next((by_column[name] for name in by_column if name in row), "prompt_completion")
        open_row = without_answer(row, found)
        is_judged = any(row.get(name) is not None for name in JUDGMENTS)
        return None if open_row is None and is_judged else {**(open_row or row), JUDGMENTS[0]: True}
    if form == "prompt_completion":
        if not _is_empty(row.get("completion")) and row.get("completion") != []:
            return None
        is_chat = isinstance(row.get("prompt"), list)
        return {**row, "completion": [{"role": "assistant", "content": OPEN}] if is_chat else OPEN}
    if form not in _TURNS_OF:
        return None
    column, role, text = _TURNS_OF[form]
    turns = row.get(column)
    if not isinstance(turns, list) or not turns or not isinstance(last := turns[-1], Mapping):
        return None
    is_answer = last.get(role) in ANSWERS
    if is_answer and not (_is_empty(last.get(text)) and not (last.get("tool_calls") or last.get("function_call"))):
        return None
    return {**row, column: [*(turns[:-1] if is_answer else turns), {role: "assistant", text: OPEN}]}


def _is_empty(value: object) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())


def find_format_of_question(row: RawRow) -> str:
    """Find the format of a row that may lack its answer, with the column of it.

    Raises:
        BadRow: no format fits.
    """
    is_complete = any(FORMATS[name].columns <= row.keys() for name in FOUND_BY_COLUMNS)
    answers = {"instruction": "output", "prompt": "completion"}
    missing = {answer: None for asked, answer in answers.items() if asked in row and not is_complete}
    return find_format({**row, **missing})


def find_format(row: RawRow) -> str:
    """Find the format of a row: the first whose columns are all present, else the first with some of them.

    Raises:
        BadRow: no format fits.
    """
    turns = row.get("conversations")
    has_roles = isinstance(turns, list) and all(isinstance(turn, Mapping) and "role" in turn for turn in turns)
    said = row.get("messages")
    if isinstance(said, list) and said and isinstance(said[0], Mapping) and {"from", "value"} <= said[0].keys():
        raise BadRow(f"'messages' has turns of from and value; give {as_option({'conversations': 'messages'})}")
    if turns and has_roles and "messages" not in row:
        raise BadRow(f"'conversations' has turns of role and content; give {as_option({'messages': 'conversations'})}")
    complete = next((name for name in FOUND_BY_COLUMNS if FORMATS[name].columns <= row.keys()), None)
    refuse_preferences(row, complete)
    if complete is not None:
        return complete
    suggestion = suggested_columns(row)
    partial = next((name for name in FOUND_BY_COLUMNS if not FORMATS[name].columns.isdisjoint(row)), None)
    if partial is not None and not suggestion:
        return partial
    listed = ", ".join(map(repr, sorted(row))) or "none"
    if len(row) == 1 and (sign := next((one for one in ";\t|" if one in next(iter(row))), None)) is not None:
        raise BadRow(
            f"has one column, {listed}: the file puts {sign!r} between its cells; save it with commas, or as .tsv with "
            "tabs"
        )
    if suggestion:
        raise BadRow(
            f"has the columns {listed}, which no format knows; say which is which, e.g. {as_option(suggestion)} (where "
            "there are several sources: columns in the source)"
        )
    needs = "; ".join(f"{name} needs {', '.join(sorted(FORMATS[name].columns))}" for name in FOUND_BY_COLUMNS)
    raise BadRow(
        f"has the columns {listed}, which no format knows ({needs}); rename them, or say which is which, e.g. "
        f"{as_option({'instruction': 'question', 'output': 'answer'})}"
    )


def hint_of_another_format(row: RawRow, form: str) -> str:
    """Advice for a row that does not follow a format and has all columns of another; empty for other rows."""
    other = next((name for name in FOUND_BY_COLUMNS if FORMATS[name].columns <= row.keys()), form)
    if form in (other, *OF_PAIRS) or FORMATS[form].columns <= row.keys():  # pairs are mixed with nothing else
        return ""
    return f"; it has the columns of {other}: give files of that format a source of their own (data.sources)"


def renamed(row: RawRow, columns: Mapping[str, str] | None) -> RawRow:
    """Rename the columns of a row; ``columns`` maps a format's name to the name in the row."""
    if not columns:
        return row
    theirs = set(columns.values())
    ours = {name: row[column] for name, column in columns.items() if column in row}
    return {**{name: value for name, value in row.items() if name not in theirs}, **ours}


# --- conversations ---------------------------------------------------------------------------------

_ROLES = ("system", "developer", "user", "assistant", "tool")
_SAME_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "function": "tool",
    "observation": "tool",
    "tool_response": "tool",
}
"""Roles by further names: ShareGPT's, OpenAI's older one, ms-swift's."""
_CALLS = ("function_call", "tool_call")
"""Roles of turns of the assistant that hold calls as JSON, in ShareGPT's and in ms-swift's conversations."""
ANSWERS = ("assistant", "gpt", *_CALLS)
"""Roles of turns of the assistant in rows."""
_MARKS = ("train", "weight", "loss", "loss_scale", "training")
"""Marks of a turn: of this format, OpenAI's, ms-swift's two, Axolotl's as its documentation names it."""
_MARK_OF_PARTS = "train_detail"
"""Axolotl's list of parts of a turn, each with whether it is trained on."""
READ_KEYS = frozenset(("role", "content", "tool_calls", *_MARKS, *THINKING_KEYS))
"""Keys of a turn that are read; only a template may use others."""
_MEDIA = ("images", "image", "videos", "video", "audios", "audio")
"""Columns of what an answer may be about besides text."""


def _begun(row: RawRow) -> Chat:
    """Conversation with the system prompt and the tools that columns of a row hold, before its first turn."""
    if (name := next((name for name in _MEDIA if row.get(name) not in EMPTY), None)) is not None:
        raise BadRow(f"has {name!r}; only text can be read; remove the row, or the column")
    system = _text(row, "system", required=False)
    return Chat([{"role": "system", "content": system}] if system else [], _tools(row))


def _chat(raw: Sequence[object], row: RawRow, column: str, may_be_empty: bool = False, of_prompt: int = 0) -> Chat:
    """Conversation of a row's turns; nothing is learnt from the first ``of_prompt`` of them."""
    chat, learns = _begun(row), False
    for number, turn in enumerate(raw, 1):
        where = f"{column!r} item {number}"
        if not isinstance(turn, Mapping):
            raise BadRow(f"{where} is {_kind(turn)}; an object with 'role' and 'content' is needed")
        message = _message(turn, where, may_be_empty)
        if number == 1 and chat.messages and message["role"] in ("system", "developer"):
            raise BadRow(f"has a 'system' and a {message['role']} turn in {column!r}; keep one")
        of_result = {"name", "tool_call_id"} if message["role"] == "tool" else set()  # which its call has
        chat.other_keys |= {key for key in message.keys() - READ_KEYS - of_result if message[key] not in EMPTY}
        mark = _mark(turn, where)
        if message["role"] == "assistant":
            learns, mark = number > of_prompt, False if number <= of_prompt else mark
        if _joins(turn, message, chat.messages) and number != of_prompt + 1:
            if mark not in (None, chat.marks.get(len(chat.messages) - 1)):
                raise BadRow(
                    f"{where}: is one answer with the turn before it, which is marked otherwise; mark both alike"
                )
            chat.messages[-1]["tool_calls"] = [*chat.messages[-1].get("tool_calls", ()), *message["tool_calls"]]
            continue
        if mark is not None:
            chat.marks[len(chat.messages)] = mark
        _check_order(chat.messages, message["role"], where)
        chat.messages.append(message)
    if not learns:
        where = "'completion'" if of_prompt else repr(column)
        raise BadRow(f"{where} holds no assistant turn; there is nothing to learn from this row, remove it")
    return chat


def _message(turn: Mapping[str, object], where: str, may_be_empty: bool) -> Message:
    name = _string(turn.get("role"), f"{where}: 'role'")
    role = "assistant" if name in _CALLS else _SAME_ROLES.get(name, name)
    if role not in _ROLES:
        raise BadRow(f"{where}: 'role' is {_shown(role)}; {_meant({}, role)}known are {', '.join(_ROLES)}")
    # Keys without a value are left out, as in Hugging Face: templates would print None.
    unread = (*_MARKS, _MARK_OF_PARTS)
    message = {key: value for key, value in turn.items() if _says(key, value) and key not in unread}
    message["role"] = role
    if "function_call" in message and "tool_calls" not in message:  # OpenAI's older form
        message["tool_calls"] = message.pop("function_call")
    if name in _CALLS:
        message["content"], message["tool_calls"] = _thinking_and_calls(message.get("content"), name, where)
    if "tool_calls" in message:
        message["tool_calls"] = _tool_calls(message["tool_calls"], where)
        if role != "assistant":
            raise BadRow(f"{where}: 'tool_calls' belong to the assistant, not to {role!r}")
    may_lack = role in ("system", "developer", "tool") or "tool_calls" in message
    content = message.get("content", "" if may_lack else None)
    if role == "tool":
        content = _result(content)
    message["content"] = _content(content, where, may_lack or may_be_empty)
    return message


def _result(content: object) -> object:
    """What a tool has returned, as JSON if it is an object, or a list of anything but parts of a message."""
    parts = [isinstance(part, dict) and "type" in part for part in content] if isinstance(content, list) else []
    is_data = isinstance(content, dict) or (bool(parts) and not any(parts))
    return json.dumps(content, ensure_ascii=False) if is_data else content


def _says(key: str, value: object) -> bool:
    """Whether a key of a turn says anything; servers and Arrow's tables write an empty list for no calls."""
    return value not in (EMPTY if key in ("tool_calls", "function_call") else (None,))


_THINKING = re.compile(r"\s*<think>.*?</think>\n?", re.DOTALL)


def _thinking_and_calls(content: object, role: str, where: str) -> tuple[str, object]:
    """Thinking, or an empty text, before the calls that a turn of one of the roles ``_CALLS`` holds, and the calls."""
    thinking, calls = "", content
    if not isinstance(content, dict | list):
        text = _string(content, f"{where}: 'content'")
        thinking = found[0] if (found := _THINKING.match(text)) else ""
        calls = _json(text[len(thinking) :], f"{where}: the text of a {role}")
    if not isinstance(calls, dict | list) or not calls:
        raise BadRow(f"{where}: the text of a {role} is {_shown(content)}; name and arguments are needed, as JSON")
    return thinking, calls


def _joins(turn: Mapping[str, object], message: Message, before: list[Message]) -> bool:
    """Whether a turn goes on with the answer before it: a call after text, or one of several calls."""
    goes_on = turn["role"] in _CALLS and not message["content"]  # thinking begins an answer
    return goes_on and bool(before) and before[-1]["role"] == "assistant"


def _meant(names: Mapping[str, str], role: str) -> str:
    """Question whether a common other name of a role was meant, by the format's names of user and assistant."""
    name = _OTHER_ROLES.get(role.strip().lower())
    return f"did you mean {names.get(name, name)}? " if name is not None else ""


_OTHER_ROLES = {
    **dict.fromkeys(("human", "user", "question", "prompter"), "user"),
    **dict.fromkeys(("ai", "assistant", "bot", "chatbot", "chatgpt", "gpt", "model"), "assistant"),
}


def _content(value: object, where: str, may_be_empty: bool) -> str:
    if isinstance(value, list):
        for part in value:
            if not isinstance(part, Mapping) or part.get("type") != "text":
                kind = f"of type {_shown(part.get('type'))}" if isinstance(part, Mapping) else f"that is {_kind(part)}"
                raise BadRow(f"{where}: 'content' holds a part {kind}; only text can be read")
        value = "".join(_string(part.get("text"), f"{where}: 'text' of 'content'") for part in value)
    return _string(value, f"{where}: 'content'", empty=may_be_empty)


def _check_order(before: list[Message], role: str, where: str) -> None:
    last = before[-1] if before else None
    if role in ("system", "developer") and any(message["role"] not in ("system", "developer") for message in before):
        raise BadRow(f"{where}: 'role' is {role!r} after other turns; it must come first")
    if role == "assistant" and last is not None and last["role"] == "assistant":
        raise BadRow(f"{where}: two assistant turns follow each other; join them, or put back what was between them")
    if role == "tool" and not (last and (last["role"] == "tool" or "tool_calls" in last)):
        raise BadRow(f"{where}: a tool's result follows no tool call; put back the assistant turn with 'tool_calls'")
    if role in ("user", "assistant") and last is not None and "tool_calls" in last:
        raise BadRow(f"{where}: the tool call before it has no result; put back the turn of role 'tool'")


def _mark(turn: Mapping[str, object], where: str) -> bool | None:
    if turn.get(_MARK_OF_PARTS):
        how = "a turn is trained on in full, or not at all (train: false)"
        raise BadRow(f"{where}: {_MARK_OF_PARTS!r} marks parts of a turn; {how}")
    for key in _MARKS:
        value = turn.get(key)
        if value is None:
            continue
        if not isinstance(value, int | float) or value not in (0, 1):
            raise BadRow(f"{where}: {key!r} is {_shown(value)}; it must be 1 or true (train on it), or 0 or false")
        # weight: 1 is OpenAI's default for every turn; it makes no user turn supervised. Nor does ms-swift's loss.
        return None if key in ("weight", "loss", "loss_scale") and value else bool(value)
    return None


def _tools(row: RawRow) -> list[JsonObject] | None:
    value = row.get("functions") if row.get("tools") in EMPTY else row["tools"]  # functions: OpenAI's older form
    if isinstance(value, str):
        value = _json(value, "'tools'") if value.strip() else None
    if value is None or value in ([], {}):
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise BadRow(f"'tools' is {_kind(value)}; a list of objects is needed, or a string that holds one as JSON")
    return [_tool(tool, f"'tools' item {number}") for number, tool in enumerate(value, 1)]


def _tool(value: JsonObject, where: str) -> JsonObject:
    bare = {key: part for key, part in value.items() if key != "type"}
    tool = value if "function" in value else {"type": "function", "function": bare}
    function = tool["function"]
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise BadRow(f"{where} is no function with a name; it needs 'name', and 'parameters' where it takes some")
    return tool


def _tool_calls(value: object, where: str) -> list[JsonObject]:
    if isinstance(value, str):
        value = _json(value, f"{where}: 'tool_calls'")
    calls = value if isinstance(value, list) else [value]
    result = []
    for call in calls:
        if (
            not isinstance(call, dict)
            or not isinstance(function := call.get("function", call), dict)
            or not isinstance(function.get("name"), str)
            or not function["name"]
        ):
            raise BadRow(f"{where}: a tool call is {_kind(call)} without a name; it needs 'name' and 'arguments'")
        arguments = {} if function.get("arguments") in (None, "") else function["arguments"]
        # OpenAI gives the arguments as JSON in a string; templates convert them to JSON themselves.
        arguments = _json(arguments, f"{where}: 'arguments'") if isinstance(arguments, str) else arguments
        if not isinstance(arguments, dict):
            raise BadRow(f"{where}: 'arguments' of {function['name']!r} is {_kind(arguments)}; an object is needed")
        extra = {key: call[key] for key in ("id",) if call.get(key) is not None}
        result.append({"type": "function", **extra, "function": {"name": function["name"], "arguments": arguments}})
    return result


def _turn(question: str, answer: str) -> list[Message]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


# --- values ----------------------------------------------------------------------------------------


def _text(row: RawRow, column: str, required: bool = True, empty: bool = True) -> str:
    value = row.get(column)
    if value is None and not required:
        return ""
    if value is None:
        raise BadRow(_no_column(row, column))
    return _string(value, repr(column), empty)


def _no_column(row: RawRow, column: str) -> str:
    if column in row:
        return f"{column!r} is null; each row needs it"
    return f"has no {column!r}; each row needs it (columns here: {', '.join(map(repr, row)) or 'none'})"


def _string(value: object, what: str, empty: bool = True) -> str:
    if value is None:
        raise BadRow(f"{what} is missing; text is needed")
    if not isinstance(value, str):
        raise BadRow(f"{what} is {_kind(value)}; text is needed")
    if not value and not empty:
        raise BadRow(f"{what} is empty; remove it, or the row")
    return value


def _list(row: RawRow, column: str, required: bool = True) -> list[object]:
    value = row.get(column)
    if value in (None, "") and not required:  # a cell of CSV is empty text
        return []
    if value is None:
        raise BadRow(_no_column(row, column))
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = _json(value, repr(column))
    if not isinstance(value, list) or (required and not value):
        raise BadRow(f"{column!r} is {'empty' if value == [] else _kind(value)}; a list is needed")
    return value


def _integers(row: RawRow, column: str, may_be_bool: bool = False) -> list[int]:
    value = row.get(column)
    if not isinstance(value, list) or not all(
        type(item) is int or (may_be_bool and type(item) is bool) for item in value
    ):
        raise BadRow(f"{column!r} is {_kind(value)}; a list of whole numbers is needed")
    if not all(-(2**31) <= item < 2**31 for item in value):
        raise BadRow(f"{column!r} holds a number that is no token id; the largest is {_shown(max(value, key=abs))}")
    return [int(item) for item in value]


def _json(text: str, what: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRow(f"{what} is not JSON ({error})") from error


def _shown(value: object) -> str:
    # Not repr of a container: it may be very long, or nested deeper than the recursion limit.
    return repr(value)[:80] if isinstance(value, str | int | float) else _kind(value)


def _kind(value: object) -> str:
    if value is None:
        return "missing"
    if isinstance(value, list) and value:
        return f"a list of {', '.join(sorted({type(item).__name__ for item in value}))}"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeio' else 'a'} {name}"
