"""Conversations as a chat template has written them, split into turns again to be read by people."""

import re
from typing import NamedTuple

_SPECIAL = (
    r"<\|[^<>|\n]{1,60}\|>|<｜[^<>｜\n]{1,60}｜>|</?(?:s|bos|eos|pad|unk)>|<(?:start|end)_of_turn>"
    r"|\[/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS)\]"
)
_ROLE = r"system|developer|user|human|assistant|model|bot|tool|function|observation|ipython"
_PART = re.compile(
    # A role after a special token, as in ChatML, Llama 3, Gemma and gpt-oss; or a special token that is a role.
    rf"(?P<opening>(?:<\|(?P<mark>{_ROLE})\|>|<｜(?P<wide>{_ROLE})｜>)"
    rf"|(?:{_SPECIAL})(?P<role>{_ROLE})(?=\n|{_SPECIAL}|$))"
    rf"|(?P<special>{_SPECIAL})",
    re.IGNORECASE,
)


class Turn(NamedTuple):
    """Turn of a conversation."""

    role: str
    """Role that the text names; empty for text before the first role, or where there are none."""
    parts: list[tuple[str, bool]]
    """Texts, each with whether it belongs to the template: a special token, or a role after one."""


def split_turns(text: str) -> list[Turn]:
    """Split a text where special tokens of the usual chat templates begin a turn; joined, the parts are the text."""
    turns = [Turn("", [])]
    end = 0
    for match in _PART.finditer(text):
        turns[-1].parts.append((text[end : match.start()], False))
        if role := match["mark"] or match["wide"] or match["role"]:
            turns.append(Turn(role.lower(), []))
        turns[-1].parts.append((match[0], True))
        end = match.end()
    turns[-1].parts.append((text[end:], False))
    kept = [Turn(role, [part for part in parts if part[0]]) for role, parts in turns]
    return [turn for turn in kept if turn.role or turn.parts]
