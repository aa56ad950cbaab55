"""Conversations as a chat template has written them, split into turns again to be read by people."""

import re
from typing import Literal, NamedTuple

_SPECIAL = (
    r"<\|[^<>|\n]{1,60}\|>|<｜[^<>｜\n]{1,60}｜>|</?(?:s|bos|eos|pad|unk)>|<(?:start|end)_of_turn>"
    r"|\[/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS)\]"
)
_ROLE = r"system|developer|user|human|assistant|model|bot|tool|function|observation|ipython"
_PART = re.compile(
    # A role after a special token, as in ChatML, Llama 3, Gemma and gpt-oss; or a special token that is a role.
    rf"(?P<opening>{_SPECIAL})(?P<role>{_ROLE})(?=\n|{_SPECIAL}|$)"
    rf"|(?P<mark><\|(?:{_ROLE})\|>|<｜(?:{_ROLE})｜>)"
    rf"|(?P<special>{_SPECIAL})",
    re.IGNORECASE,
)


class Part(NamedTuple):
    """Part of a turn."""

    text: str
    kind: Literal["text", "special", "role"] = "text"
    """A special token and a role belong to the template."""


Turn = list[Part]
"""Turn of a conversation, with its role in its place where the text names one."""


def split_turns(text: str) -> list[Turn]:
    """Split a text where a special token of the usual chat templates begins a turn; joined, the parts are the text."""
    turns: list[Turn] = [[]]
    end = 0
    for match in _PART.finditer(text):
        turns[-1].append(Part(text[end : match.start()]))
        if match["special"] is None:
            turns.append([])
        opening, role, mark, special = match["opening"], match["role"], match["mark"], match["special"]
        turns[-1] += [Part(opening or special or "", "special"), Part(role or mark or "", "role")]
        end = match.end()
    turns[-1].append(Part(text[end:]))
    turns = [[part for part in turn if part.text] for turn in turns]
    return [turn for turn in turns if turn]
