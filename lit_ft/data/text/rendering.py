"""Conversion of examples to pieces of text, each supervised or not.

A conversation is rendered prefix by prefix, so that no template needs generation marks: the rendered turns
before an answer (with the generation prompt) are not supervised, the answer's text and its
end-of-turn token are. Each piece is tokenized separately, exactly as at inference, where the prompt's
tokens are given and the answer's are generated.
"""

import os
from dataclasses import replace
from typing import Literal

from lit_callbacks.protocols import Message

from lit_ft.data.text.chat_template import ChatTemplate, spell_out_tools
from lit_ft.data.text.formats import THINKING_KEYS, Chat, JsonObject, Text
from lit_ft.errors import BadRow, RecipeError

Piece = tuple[str, bool]
"""Text, and whether it is supervised."""

Supervise = Literal["assistant", "last", "all"]


def prompt_of(chat: Chat, template: ChatTemplate) -> tuple[str, Message]:
    """Prompt of the last answer as the model sees it, and the turn before that answer."""
    chat = with_tools(chat, template, [])  # turns may become fewer, or more
    last = _answers(chat)[-1]
    return _before(chat, last, template), chat.messages[max(last - 1, 0)]


def expected_answer(chat: Chat, template: ChatTemplate) -> str:
    """Text that training supervises of the last answer, without the tokens that end it.

    It is the answer's content, with all that the template writes for it besides: thinking, channels, tool calls.

    Raises:
        BadRow: the template does not render it, or not behind the turns before.
    """
    chat = with_tools(chat, template, [])
    last = _answers(chat)[-1]
    _, turn = _cut(chat, last, _before(chat, last, template), _render(chat, last + 1, template), template, [])
    return template.without_end(template.cut_after_end_of_turn(turn)[0])


def text_pieces(text: Text, closing: str) -> list[Piece]:
    """Pieces of raw text: the prompt, and the text with the end-of-sequence token ``closing``, unless it has it."""
    return [(text.prompt, False), (text.text if is_closed(text.text, closing) else text.text + closing, True)]


def is_closed(text: str, closing: str) -> bool:
    """Whether raw text ends with the end-of-sequence token ``closing``, behind which templates write a line break."""
    return text.rstrip().endswith(closing)


def chat_samples(
    chat: Chat,
    template: ChatTemplate,
    supervise: Supervise,
    closing: str,
    notes: list[str],
    keeps_ending: bool = False,
) -> list[list[Piece]]:
    """Split a conversation into supervised and unsupervised text.

    Args:
        chat: conversation to split.
        template: chat template that renders it.
        supervise: supervised turns: assistant is every assistant turn that is not marked otherwise; last is the last
            assistant turn; all is every token up to the end of the last answer.
        closing: end-of-sequence token, for templates that do not close an assistant's turn with a special token.
        notes: list that names of ``tokenization.NOTES`` are appended to.
        keeps_ending: whether a sample ends as the template ends the conversation after its last answer: with what it
            writes behind the end of the turn, and without ``closing``.

    Returns:
        One sample, or several where the template changes earlier turns when more follow (for example, templates
        that drop earlier thinking): then each answer has the prompt that it has at inference. Empty
        where nothing is supervised.

    Raises:
        BadRow: the template does not render it, or leaves part of it out.
    """
    chat = with_tools(chat, template, notes)
    turns = supervised_turns(chat, supervise)
    if not turns:
        return []
    if turns[-1] < len(chat.messages) - 1 and not _is_answer(chat, -1):
        notes.append("ends without answer")
    before_last = _before(chat, turns[-1], template)
    template.check_seen(chat.messages[: turns[-1]], before_last)
    if chat.tools and before_last == _before(replace(chat, tools=None), turns[-1], template):
        raise BadRow(f"{template.name} leaves out its 'tools'; give another template, or take them out of the row")
    if template.is_dated(chat.messages[: turns[-1] + 1], chat.tools):
        notes.append("dated")
    samples: list[list[Piece]] = [[]]
    done = ""
    for i in turns:
        # Turn by turn: the texts up to all of them together take memory by the square of their number.
        before = before_last if i == turns[-1] else _before(chat, i, template)
        before, rendered = _cut(chat, i, before, _render(chat, i + 1, template), template, notes)
        turn, has_end = template.cut_after_end_of_turn(rendered)
        if not turn.removesuffix(template.ending).strip():
            if not chat.messages[i]["content"].strip() and "tool_calls" not in chat.messages[i]:
                raise BadRow(f"turn {i + 1} ({chat.messages[i]['role']}) is blank; there is nothing to learn from it")
            raise BadRow(f"{template.name} shows nothing of turn {i + 1} ({chat.messages[i]['role']})")
        if _is_answer(chat, i):
            notes += _left_out(chat, i, before, turn, template)
        is_ending = keeps_ending and i == turns[-1]
        if not has_end and _is_answer(chat, i) and not is_ending:
            notes.append("end of turn added")
            turn += closing
        if not before.startswith(done):
            notes.append("split")
            samples.append([])
            done = ""
        samples[-1] += [(before[len(done) :], supervise == "all"), (turn, True)]
        samples[-1] += [(rendered[len(turn) :], False)] if is_ending else []
        done = before + turn
    return samples


def _render(chat: Chat, turns: int, template: ChatTemplate, generation: bool = False) -> str:
    try:
        return template.render(chat.messages[:turns], chat.tools, generation)
    except RecipeError:
        raise
    except Exception as error:  # a template may raise any type
        raise BadRow(f"{template.name} does not render it ({type(error).__name__}: {error})") from error


def _before(chat: Chat, i: int, template: ChatTemplate) -> str:
    """Rendered text before the content of a turn; before an answer, the prompt of inference."""
    if _is_answer(chat, i):
        try:
            return _render(chat, i, template, generation=True)
        except BadRow:
            if i > 0:
                raise
    # A question has no generation prompt, and few templates render an empty conversation.
    return _begin(chat.messages[: i + 1], chat.tools, template)


def _thinking_put_back(message: Message, opener: str, turn: str) -> str:
    """Content of an answer after ``opener``, e.g. ``<think>``, which the generation prompt has and ``turn`` has not.

    ``turn`` is the answer as the template renders it. Empty if the answer does not begin with ``opener``, or if the
    template leaves nothing out. Templates drop the thinking of finished turns, including the last one, although the
    model has to generate it.
    """
    begin, content = opener.strip(), message["content"].lstrip()
    if not begin or not content.startswith(begin) or "tool_calls" in message or not _leaves_out(message, turn):
        return ""
    rest: str = content[len(begin) :]
    return rest.lstrip() if opener[-1:].isspace() else rest


def _left_out(chat: Chat, i: int, before: str, turn: str, template: ChatTemplate) -> list[str]:
    """Names of ``tokenization.NOTES`` for the parts of an answer that the template leaves out."""
    message, notes = chat.messages[i], []
    if _leaves_out(message, turn):
        # The generation prompt may contain the beginning of the answer, which opens its thinking.
        earlier = _render(chat, i, template)
        opened = before[len(earlier) :] if before.startswith(earlier) else ""
        if _leaves_out(message, opened + turn):
            notes.append("answer left out in part")
    thinking = [message[key] for key in THINKING_KEYS if message.get(key) not in (None, True, False)]
    if any(_squeezed(str(text)) not in _squeezed(turn) for text in thinking):
        notes.append("thinking left out")
    return notes


def _leaves_out(message: Message, turn: str) -> bool:
    """Whether part of an answer is missing in its rendered turn; white space is ignored."""
    names = [call["function"]["name"] for call in message.get("tool_calls", [])]
    if any(turn.count(name) < names.count(name) for name in names):
        return True
    content = message["content"].strip()
    return content not in turn and _squeezed(content) not in _squeezed(turn)


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _is_answer(chat: Chat, i: int) -> bool:
    return bool(chat.messages[i]["role"] == "assistant")


def with_tools(chat: Chat, template: ChatTemplate, notes: list[str]) -> Chat:
    """Conversation that the template renders in full: tools that it would leave out are text, with a note in ``notes``.

    Raises:
        BadRow: the tools cannot be written as text.
    """
    if not chat.tools and not any(m["role"] == "tool" or "tool_calls" in m for m in chat.messages):
        return chat
    if template.renders_tools:
        return chat
    notes.append("tools spelled out")
    try:
        return spell_out_tools(chat)
    except (TypeError, ValueError) as error:
        raise BadRow(f"its tools cannot be written as JSON ({error}); keep them as JSON in a string") from error


def _answers(chat: Chat) -> list[int]:
    return [i for i in range(len(chat.messages)) if _is_answer(chat, i)]


def supervised_turns(chat: Chat, supervise: Supervise) -> list[int]:
    """Numbers of the turns that are supervised, from 0; with ``all``, the turn that supervision ends with."""
    answers = _answers(chat)
    if supervise == "all":
        return answers[-1:]
    turns = set(answers[-1:] if supervise == "last" else answers)
    turns |= {i for i, mark in chat.marks.items() if mark and supervise == "assistant"}
    return sorted(i for i in turns if chat.marks.get(i, True))


def through_last_supervised_answer(chat: Chat, supervise: Supervise) -> Chat | None:
    """Conversation up to the last answer that is supervised, with it; None where no answer is."""
    answers = [i for i in supervised_turns(chat, supervise) if _is_answer(chat, i)]
    return replace(chat, messages=chat.messages[: answers[-1] + 1]) if answers else None


def _cut(chat: Chat, i: int, before: str, through: str, template: ChatTemplate, notes: list[str]) -> tuple[str, str]:
    """Split the text up to a turn into the unsupervised text before it, if possible the prompt of inference, and it."""
    if through.startswith(before):
        return before, through[len(before) :]
    earlier = _render(chat, i, template)
    if through.startswith(earlier):
        # Not beyond the template's opening: an answer may begin with the same text as the generation prompt.
        furthest = earlier + template.opening
        opened = _common([before, through, furthest])
        if opened != furthest:  # not within a token: `<think>` and `</think>` begin alike
            opened = through[: template.boundary(through, len(earlier), len(opened))]
        if goes_on := _thinking_put_back(chat.messages[i], before[len(opened) :], through[len(opened) :]):
            notes.append("thinking put back")
            return before, goes_on + template.closing
        notes.append("other opening")
        return opened, through[len(opened) :]
    # Mistral's template writes a system prompt into the last turn if it is the user's, and no content beside a call;
    # gpt-oss's leaves out what the model thought before a call once an answer follows it.
    hidden = (*THINKING_KEYS, "tool_calls")
    plain = {key: value for key, value in chat.messages[i].items() if key not in hidden}
    opened, generation = _begin([*chat.messages[:i], plain], chat.tools, template), before.removeprefix(earlier)
    if before.startswith(earlier) and opened.endswith(template.opening) and template.opening.startswith(generation):
        start = len(opened) - len(template.opening) + len(generation)
        if through.startswith(opened[:start]):
            return before, through[start:]
    raise BadRow(
        f"{template.name} writes the turns before turn {i + 1} in another way once it follows, so that its place "
        "cannot be told; give another template with data.chat_template"
    )


def _begin(messages: list[Message], tools: list[JsonObject] | None, template: ChatTemplate) -> str:
    """Rendered text before the content of the last turn, found by rendering that turn with another content."""
    *before, last = messages
    other = {**last, "content": "b" if last["content"].lstrip().startswith("a") else "a"}
    return _common([_render(Chat([*before, turn], tools), len(messages), template) for turn in (last, other)])


def _common(texts: list[str]) -> str:
    return os.path.commonprefix(texts)  # noqa: RUF071 (a prefix of characters, not of path parts)
