"""Shapes of rows of preference data: where a row holds prompt, chosen and rejected answer, or a judgment."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from lit_ft.data.text.columns import JUDGMENTS, PREFERENCE, as_option
from lit_ft.data.text.sources import RawRow
from lit_ft.errors import BadRow

REJECTED_TEXT = "rejected_response"
"""Column of ms-swift: the rejected answer, beside messages that end with the chosen one."""
_PROMPTS = ("prompt", "messages", "conversations")
"""Columns that may hold a prompt as turns, the first of them that is a list."""

Turns = list[Any]
"""Raw turns of ``role`` and ``content``."""


class Comparison(NamedTuple):
    """A prompt and two answers to it, as a row holds them."""

    prompt: Turns | str | None
    """Turns, or bare text; None where the prompt is ``instruction`` and its companions."""
    chosen: Turns | str
    """Turns where the prompt is turns, else text."""
    rejected: Turns | str
    columns: frozenset[str]
    """Columns that the prompt is in."""


def comparison_of(row: RawRow) -> Comparison:
    """Find prompt and answers in a row.

    Raises:
        BadRow: an answer or the prompt is missing, or they do not go together.
    """
    if "chosen" not in row and row.get(REJECTED_TEXT) is not None and isinstance(row.get("messages"), list):
        *prompt, chosen = row["messages"] or [None]
        row = {**row, "messages": prompt, "chosen": chosen, "rejected": row[REJECTED_TEXT]}
    chosen, rejected = (_answer(row, name) for name in PREFERENCE)
    column = next((name for name in _PROMPTS if row.get(name) and isinstance(row[name], list)), None)
    # UltraFeedback's messages are the chosen conversation once more.
    are_whole = isinstance(chosen, list) and isinstance(rejected, list) and chosen[0] == rejected[0]
    if column == "prompt" or (column is not None and not are_whole):
        return Comparison(_in_roles(row[column]), _as_turns(chosen), _as_turns(rejected), frozenset({column}))
    if isinstance(chosen, list) and isinstance(rejected, list):
        return _of_whole_conversations(row, chosen, rejected)
    if isinstance(chosen, list) or isinstance(rejected, list):
        raise BadRow("'chosen' and 'rejected' are of two kinds; give both as texts, or both as turns")
    if row.get("instruction"):
        return Comparison(None, chosen, rejected, frozenset({"instruction", "input", "history"}))
    if isinstance(prompt := row.get("prompt"), str) and prompt:
        return Comparison(prompt, chosen, rejected, frozenset({"prompt"}))
    raise BadRow(
        "'chosen' and 'rejected' are texts without a prompt; give it in 'prompt' (text, or a list of turns), "
        "'instruction', 'messages' or 'conversations', and in 'chosen' and 'rejected' the answers alone; where it has "
        f"another column, map that, e.g. {as_option({'instruction': 'question'})}"
    )


def judgment_of(row: RawRow) -> tuple[str, bool]:
    """Column that says whether the answer of a row is a good one, and what it says.

    Raises:
        BadRow: there is none, or it says something else.
    """
    column = next((name for name in JUDGMENTS if row.get(name) is not None), None)
    if column is None:
        found = ", ".join(map(repr, row)) or "none"
        raise BadRow(
            "has no 'label', which says whether the answer is a good one (true or false); give it (columns here: "
            f"{found})"
        )
    said = str(row[column]).strip().lower()
    if said not in _GOOD and said not in _BAD:
        raise BadRow(f"{column!r} is {row[column]!r}; true or 1 is needed for a good answer, false or 0 for a bad one")
    return column, said in _GOOD


_GOOD, _BAD = ("true", "1", "1.0"), ("false", "0", "0.0")
"""Values of a judgment, also as cells of a table hold them."""


def _answer(row: RawRow, name: str) -> Turns | str:
    answer = row.get(name)
    if answer is None:
        found = ", ".join(map(repr, row)) or "none"
        raise BadRow(f"has no {name!r}; each row needs 'chosen' and 'rejected' (columns here: {found})")
    if not isinstance(answer, str | list | Mapping):
        raise BadRow(f"{name!r} is of type {type(answer).__name__}; text, a turn or a list of turns is needed")
    if not answer or (isinstance(answer, str) and not answer.strip()):
        raise BadRow(f"{name!r} is empty; an answer needs text, remove the row")
    return answer if isinstance(answer, str) else _in_roles(answer if isinstance(answer, list) else [answer])


def _of_whole_conversations(row: RawRow, chosen: Turns, rejected: Turns) -> Comparison:
    """Take the turns that two conversations begin with as the prompt."""
    common = next(
        (at for at, (one, other) in enumerate(zip(chosen, rejected, strict=False)) if one != other),
        min(len(chosen), len(rejected)),
    )
    if common == 0:
        raise BadRow(
            "'chosen' and 'rejected' have no turn in common that they answer; let both begin with the same prompt, or "
            "give it as a list of turns in 'prompt'"
        )
    if common == len(chosen) == len(rejected):
        raise BadRow("'chosen' and 'rejected' are equal, so there is nothing to compare; remove the row")
    if common in (len(chosen), len(rejected)):
        raise BadRow("one of 'chosen' and 'rejected' is the beginning of the other, without an answer of its own")
    prompt = chosen[:common]
    turns = (turn for turn in prompt if isinstance(turn, Mapping))
    asked = next((turn.get("content") for turn in turns if turn.get("role") in ("user", "human")), None)
    if (text := row.get("prompt")) and text != asked:
        raise BadRow(
            "'prompt' is not the first question of 'chosen' and 'rejected', which begin with their prompt; leave it out"
        )
    return Comparison(prompt, chosen[common:], rejected[common:], frozenset({"prompt"}))


def _as_turns(answer: Turns | str) -> Turns:
    return answer if isinstance(answer, list) else [{"role": "assistant", "content": answer}]


def _in_roles(turns: Turns) -> Turns:
    """Turns of ``from`` and ``value`` with the keys of the others."""
    names = {"from": "role", "value": "content"}
    return [
        {names.get(key, key): value for key, value in turn.items()}
        if isinstance(turn, Mapping) and "from" in turn and "role" not in turn
        else turn
        for turn in turns
    ]
