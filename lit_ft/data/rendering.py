"""Examples to pieces of text: which are supervised, proven by rendering prefixes.

A conversation is rendered prefix by prefix, so that no template needs generation marks: what the turns
before an answer render to (with the generation prompt) is not supervised, the answer's text and its
end-of-turn token are. Each piece is tokenised on its own, exactly as at inference, where the prompt's
tokens are given and the answer's are produced.
"""

import os
from collections import Counter
from typing import Literal

from lit_ft.data.formats import Chat, Message, Text
from lit_ft.data.templates import ChatTemplate, spell_out_tools
from lit_ft.errors import BadRow

Piece = tuple[str, bool]
"""Text, and whether it is supervised."""

Supervise = Literal["assistant", "last", "all"]


def prompt_and_answer(chat: Chat, template: ChatTemplate) -> tuple[str, Message, Message]:
    """What the model sees before its last answer, the turn it answers, and that answer."""
    last = _answers(chat)[-1]
    chat = _with_tools(chat, template, Counter())
    prompt = template.render(chat.messages[:last], chat.tools, generation=True)
    return prompt, chat.messages[max(last - 1, 0)], chat.messages[last]


def text_pieces(text: Text, opening: str, closing: str) -> list[Piece]:
    """Raw text between the tokens that a sequence opens and closes with."""
    return [(opening + text.prompt, False), (text.text + closing, True)]


def chat_samples(
    chat: Chat, template: ChatTemplate, supervise: Supervise, closing: str, notes: Counter[str]
) -> list[list[Piece]]:
    """Cut a conversation into supervised and unsupervised text.

    Args:
        chat: the conversation.
        template: renders it.
        supervise: assistant is every assistant turn that is not marked otherwise; last is the last one;
            all is every token through the last answer.
        closing: the end-of-sequence token, for templates that close an assistant's turn with none.
        notes: counts what was not as expected.

    Returns:
        One sample, or several where the template rewrites earlier turns once more follow (as templates do
        that drop earlier thinking): then each answer comes with the prompt that it has at inference. None
        where nothing is supervised.

    Raises:
        BadRow: the template does not render it, or leaves part of it out.
    """
    chat = _with_tools(chat, template, notes)
    turns = _supervised_turns(chat, supervise)
    if not turns:
        return []
    if chat.messages[-1]["role"] != "assistant":
        notes["ends without answer"] += 1
    try:
        befores = [template.render(chat.messages[:i], chat.tools, _is_answer(chat, i)) for i in turns]
        throughs = [template.render(chat.messages[: i + 1], chat.tools) for i in turns]
    except Exception as error:  # a template's own refusals are of any type
        raise BadRow(f"{template.name} does not render it ({type(error).__name__}: {error})") from error
    template.check_seen(chat.messages[: turns[-1]], befores[-1])
    samples: list[list[Piece]] = [[]]
    done = ""
    for i, before, through in zip(turns, befores, throughs, strict=True):
        before = _opening(chat, i, before, through, template, notes)
        turn, has_end = template.cut_after_end_of_turn(through[len(before) :])
        if not turn.removesuffix(template.end_of_turn).strip():
            raise BadRow(f"{template.name} shows nothing of turn {i + 1} ({chat.messages[i]['role']})")
        if not has_end:
            notes["end of turn added"] += 1
            turn += closing
        if not before.startswith(done):
            notes["split"] += 1
            samples.append([])
            done = ""
        samples[-1] += [(before[len(done) :], supervise == "all"), (turn, True)]
        done = before + turn
    return samples


def _is_answer(chat: Chat, i: int) -> bool:
    return bool(chat.messages[i]["role"] == "assistant")


def _with_tools(chat: Chat, template: ChatTemplate, notes: Counter[str]) -> Chat:
    if not chat.tools and not any(m["role"] == "tool" or "tool_calls" in m for m in chat.messages):
        return chat
    if template.renders_tools:
        return chat
    notes["tools spelled out"] += 1
    return spell_out_tools(chat)


def _answers(chat: Chat) -> list[int]:
    return [i for i in range(len(chat.messages)) if _is_answer(chat, i)]


def _supervised_turns(chat: Chat, supervise: Supervise) -> list[int]:
    answers = _answers(chat)
    if supervise == "all":
        return answers[-1:]
    wanted = set(answers[-1:] if supervise == "last" else answers)
    wanted |= {i for i, mark in chat.marks.items() if mark and supervise == "assistant"}
    return sorted(i for i in wanted if chat.marks.get(i, True))


def _opening(chat: Chat, i: int, before: str, through: str, template: ChatTemplate, notes: Counter[str]) -> str:
    """The unsupervised text before a turn: as at inference, where the template itself goes on like that."""
    if through.startswith(before):
        return before
    earlier = template.render(chat.messages[:i], chat.tools)
    if not through.startswith(earlier):
        raise BadRow(
            f"{template.name} writes the turns before turn {i + 1} in another way once it follows, so that its place "
            "cannot be told; give another template with data.chat_template"
        )
    notes["other opening"] += 1
    return os.path.commonprefix([before, through])  # noqa: RUF071 (characters are what is wanted)
