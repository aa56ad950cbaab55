"""Chat templates: the tokenizer's own, one given by the recipe, or one of four built-in ones."""

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from lit_callbacks.protocols import Message
from transformers import PreTrainedTokenizerBase

from lit_ft.data.text.built_in_templates import BUILT_IN
from lit_ft.data.text.formats import Chat, JsonObject
from lit_ft.data.text.template_options import CLOCK, at_date, check_options, day_of, uses, with_defaults, writes_today
from lit_ft.errors import BadRow, RecipeError
from lit_ft.internals.transformers import compile_chat_template
from lit_ft.model.render_limits import CHARACTERS, Rendering, check_length


def set_chat_template(
    tokenizer: PreTrainedTokenizerBase, template: str | None, options: Mapping[str, object] | None = None
) -> None:
    """Set the tokenizer's chat template.

    Args:
        tokenizer: changed in place.
        template: name of a built-in template, Jinja text, or a file of it; None keeps the tokenizer's own.
        options: variables for the template, as ``data.template_options``. They become its defaults, so that whoever
            is given the tokenizer (an adapter's folder, a merged model, a GGUF file) renders what training did.

    Raises:
        RecipeError: it is none of these, the tokenizer lacks a special token of a built-in template, or the template
            does not use an option.
    """
    if template is not None:
        tokenizer.chat_template = _template_text(tokenizer, template)
    if options and (own := tokenizer.chat_template):
        check_options(tokenizer, options)
        tokenizer.chat_template = (
            {name: with_defaults(text, options) for name, text in own.items()}
            if isinstance(own, dict)
            else with_defaults(own, options)
        )


def _template_text(tokenizer: PreTrainedTokenizerBase, template: str) -> str:
    if template in BUILT_IN:
        text = BUILT_IN[template]
        marks = sorted(set(re.findall(r"<\|\w+\|>|<\w+_of_turn>", text)))
        if missing := [mark for mark in marks if mark not in tokenizer.get_added_vocab()]:
            raise RecipeError(
                f"data.chat_template={template!r} needs the tokens {', '.join(missing)}, which the tokenizer of "
                f"{tokenizer.name_or_path!r} does not have; use plain, or the tokenizer's own template"
            )
        return text
    if "{" in template:
        return template
    if (file := Path(template).expanduser()).is_file():
        return file.read_text(encoding="utf-8")
    raise RecipeError(
        f"data.chat_template={template!r} is no file, no Jinja text, and not built in ({', '.join(BUILT_IN)}); "
        "give one of these, or leave it out for the tokenizer's own"
    )


_VARIANTS = 64
"""Number of templates with other variables that a template keeps."""


class ChatTemplate:
    """A tokenizer's chat template, with its properties, which are found by rendering test conversations."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: dict[str, object] | None = None) -> None:
        """Compile a tokenizer's template and render a test conversation.

        Args:
            tokenizer: tokenizer with a ``chat_template``.
            options: variables for the template, e.g. ``{"enable_thinking": False}``; ``strftime_now`` is a date, in
                place of today, for templates that write the date.

        Raises:
            RecipeError: there is no template, or it does not render a question and an answer.
        """
        if not tokenizer.chat_template:
            raise RecipeError(
                f"the tokenizer of {tokenizer.name_or_path!r} has no chat template, which conversations need; give one "
                f"with --data.chat_template FILE.jinja, or a built-in one ({', '.join(BUILT_IN)}), or train on raw text"
            )
        self._tokenizer, self._given, self._options = tokenizer, dict(options or {}), dict(options or {})
        self.name = f"the chat template of {tokenizer.name_or_path!r}"
        check_options(tokenizer, self._options)
        self._day = day_of(self._options.pop(CLOCK, None))
        self._rendering = Rendering(self.name)
        try:
            with self._rendering:
                self._compiled = compile_chat_template(self._text(None) or tokenizer.get_chat_template())
        except (TemplateError, OverflowError, RecursionError, SyntaxError) as error:
            raise RecipeError(
                f"{self.name} is no Jinja template ({type(error).__name__}: {error}); give another one with "
                "data.chat_template"
            ) from error
        given = {"tools": None, "documents": None, **tokenizer.special_tokens_map, **self._options}
        self._variables = {**self._compiled.globals, **given}
        self._variants: dict[str, ChatTemplate] = {}
        try:
            self.closing = self.render([_QUESTION, _ANSWER]).rpartition(_ANSWER["content"])[2]
        except RecipeError:
            raise
        except Exception as error:
            raise RecipeError(
                f"{self.name} does not render a question and an answer ({type(error).__name__}: {error}); give another "
                "one with data.chat_template"
            ) from error
        added = tokenizer.added_tokens_decoder.values()
        special = _any_of({token.content for token in added if token.special})
        self._whole = re.compile(rf"{_any_of({token.content for token in added})}|\s+")
        self._special = re.compile(special)
        self._adjacent_specials = re.compile(rf"(?:{special})+")
        self._tail = re.compile(rf"(?:{special}|\s)*\Z")

    def with_options(self, options: Mapping[str, object]) -> "ChatTemplate":
        """The same template with these variables, in place of those of the same name.

        Templates are kept for the next call, as making one renders test conversations.

        Raises:
            RecipeError: the template does not use one, or does not render with them.
        """
        if not options:
            return self
        key = json.dumps(options, sort_keys=True, default=str)
        if key not in self._variants:
            if len(self._variants) == _VARIANTS:
                self._variants.clear()
            self._variants[key] = ChatTemplate(self._tokenizer, {**self._given, **options})
        return self._variants[key]

    def uses(self, name: str) -> bool:
        """Whether the template has a variable of this name."""
        return uses(self._tokenizer, name)

    def render(
        self, messages: Sequence[Message], tools: list[JsonObject] | None = None, generation: bool = False
    ) -> str:
        """Render the text of a conversation, with ``generation`` followed by the generation prompt.

        Raises:
            RecipeError: the template exceeds the limits on time, memory or length of one conversation.
        """
        with self._rendering:
            text = self._render(messages, tools, generation)
        if len(text) > CHARACTERS:
            check_length(self.name, text, len(str((messages, tools))))
        return text

    def _render(self, messages: Sequence[Message], tools: list[JsonObject] | None, generation: bool) -> str:
        if tools is not None or not all(message.keys() == _PLAIN_KEYS for message in messages):
            return str(self._apply(messages, tools, tokenize=False, add_generation_prompt=generation))
        # What apply_chat_template does for plain turns, without the copies that cost more than tokenizing a short row.
        variables = {**self._variables, "messages": messages, "add_generation_prompt": generation}
        context = self._compiled.environment.context_class(
            self._compiled.environment, variables, None, self._compiled.blocks
        )
        return "".join(self._compiled.root_render_func(context))

    def ids(
        self, messages: Sequence[Message], tools: list[JsonObject] | None = None, generation: bool = False
    ) -> list[int]:
        """Token ids of a conversation as ``apply_chat_template`` gives them: the reference for what training sees."""
        with self._rendering:
            # verbose would warn of text beyond the tokenizer's length, which nobody runs through the model.
            how = {"add_generation_prompt": generation, "return_dict": True, "tokenizer_kwargs": {"verbose": False}}
            return list(self._apply(messages, tools, **how)["input_ids"])

    def _apply(self, messages: Sequence[Message], tools: list[JsonObject] | None, **how: object) -> Any:
        return self._tokenizer.apply_chat_template(
            list(messages), tools, chat_template=self._text(tools), **how, **self._options
        )

    def _text(self, tools: list[JsonObject] | None) -> str | None:
        """Template with the date of the options in place of today; None is the tokenizer's own."""
        if self._day is None:
            return None
        return at_date(self._tokenizer.get_chat_template(tools=tools), self._day)

    def is_dated(self, messages: Sequence[Message], tools: list[JsonObject] | None = None) -> bool:
        """Whether a conversation is rendered with today's date."""
        return len({one.render(messages, tools) for one in self._on_two_days}) > 1

    @cached_property
    def _on_two_days(self) -> list["ChatTemplate"]:
        if self._day is not None or not writes_today(str(self._tokenizer.chat_template)):
            return []
        return [ChatTemplate(self._tokenizer, {**self._options, CLOCK: day}) for day in _TWO_DAYS]

    @cached_property
    def ending(self) -> str:
        """Text that closes the assistant's turn, up to its last special token; empty where there is none.

        The token that stops generation may follow another one (``<|END_RESPONSE|><|END_OF_TURN_TOKEN|>``).
        Tokens that are absent once another turn follows close the full text, not the turn. Those behind the
        end-of-sequence token open the next turn, which some templates do whoever speaks.
        """
        run = self._adjacent_specials.search(self.closing)
        if run is None:
            return ""
        stays = len(os.path.commonprefix([self.closing, self._closing_before_a_question()]))  # noqa: RUF071
        tokens = list(self._special.finditer(run.group()))
        ends = {run.start() + token.end(): token.group() for token in tokens}
        kept = [end for end in ends if end <= stays] or [min(ends)]
        return self.closing[: next((end for end in kept if ends[end] == self._tokenizer.eos_token), kept[-1])]

    def _closing_before_a_question(self) -> str:
        try:
            return self.render([_QUESTION, _ANSWER, _QUESTION]).partition(_ANSWER["content"])[2]
        except RecipeError:
            raise
        except Exception:  # a template may raise anything: this one takes a single question and answer only
            return ""

    @cached_property
    def end_of_turn(self) -> str:
        """Special token that ends the assistant's turn; empty where there is none."""
        return self._special.findall(self.ending)[-1] if self.ending else ""

    @cached_property
    def opening(self) -> str:
        """Text between a question and its answer; the generation prompt may differ from it."""
        through, before = self.render([_QUESTION, _ANSWER]), self.render([_QUESTION])
        return through.removeprefix(before).partition(_ANSWER["content"])[0]

    @cached_property
    def generation_prompt(self) -> str:
        """Text that follows a question at inference."""
        return self.render([_QUESTION], generation=True).removeprefix(self.render([_QUESTION]))

    @cached_property
    def renders_tools(self) -> bool:
        """Whether the rendered text contains declared tools, tool calls and tool results."""
        name, value, result = "probe_tool", "probe_value", "probe_result"
        schema = {"type": "object", "properties": {"probe_argument": {"type": "string"}}}
        tools = [{"type": "function", "function": {"name": name, "description": "probe", "parameters": schema}}]
        call = {
            "type": "function",
            "id": "call00001",
            "function": {"name": name, "arguments": {"probe_argument": value}},
        }
        messages = [
            _QUESTION,
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": name, "tool_call_id": "call00001", "content": result},
            _ANSWER,
        ]
        try:
            text = self.render(messages, tools)
        except RecipeError:
            raise
        except Exception:  # a template may raise anything: this one does not render tools
            return False
        return all(part in text for part in ("probe_argument", value, result))

    def boundary(self, text: str, start: int, end: int) -> int:
        """Last position from ``start`` to ``end`` where an added token or white space begins or ends."""
        near = takewhile(lambda match: match.start() <= end, self._whole.finditer(text, start))
        return max((edge for match in near for edge in match.span() if edge <= end), default=start)

    def cut_after_end_of_turn(self, text: str) -> tuple[str, bool]:
        """Cut an assistant turn's text after its end-of-turn token; return it, and whether it has such a token.

        Text that a template writes after that token is part of no turn, nor is trailing white space where there is no
        such token. A turn with tool calls may end differently: for example with Gemma 4's
        ``<tool_call|><|tool_response>``, where generation stops at the last token.
        """
        if self.ending and text.endswith(self.closing):
            return text[: len(text) - len(self.closing) + len(self.ending)], True
        tail = self._tail.search(text)
        run = self._adjacent_specials.search(text, tail.start()) if tail else None
        if run is None:
            return text.removesuffix(self.closing[len(self.closing.rstrip()) :]), False
        ends = [run.start() + token.end() for token in self._special.finditer(run.group())]
        at_end_of_turn = [end for end in ends if self.end_of_turn and text[:end].endswith(self.end_of_turn)]
        return text[: (at_end_of_turn or ends[-1:])[0]], True

    def without_end(self, text: str) -> str:
        """An assistant turn's text without the special tokens and the white space at its end."""
        return self._tail.sub("", text, count=1)

    def check_seen(self, messages: Sequence[Message], text: str) -> None:
        """Refuse a rendering that leaves out the text of a user turn or a system prompt.

        Raises:
            BadRow: the text of a turn is missing.
        """
        for number, message in enumerate(messages, 1):
            if message["role"] in ("system", "developer", "user") and message["content"].strip() not in text:
                raise BadRow(
                    f"{self.name} leaves out the text of turn {number} ({message['role']}); give another template, or "
                    "take the turn out"
                )


def _any_of(tokens: Iterable[str]) -> str:
    """Regular expression that matches each token, the longest first."""
    return "|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or "(?!)"


def spell_out_tools(chat: Chat) -> Chat:
    """Write a conversation's functions, tool calls and tool results as text, for templates that cannot render them.

    Calls and results have the tags that Hermes and Qwen use.
    """
    messages: list[Message] = []
    marks: dict[int, bool] = {}
    if chat.tools and (chat.messages[0]["role"] == "assistant" or chat.marks.get(0)):
        # The list of functions must not be supervised.
        messages.append({"role": "system", "content": ""})
    for i, message in enumerate(chat.messages):
        if message["role"] == "tool":
            result = f"<tool_response>\n{message['content']}\n</tool_response>"
            if chat.messages[i - 1]["role"] == "tool":  # several results form one turn, as several calls do
                messages[-1]["content"] += f"\n{result}"
                marks[len(messages) - 1] = marks.get(len(messages) - 1, False) or chat.marks.get(i, False)
                continue
            spelled = {"role": "user", "content": result}
        else:
            calls = [_spell(call["function"]) for call in message.get("tool_calls", [])]
            text = "\n".join(part for part in (message["content"], *calls) if part)
            spelled = {**{key: value for key, value in message.items() if key != "tool_calls"}, "content": text}
        if i in chat.marks:
            marks[len(messages)] = chat.marks[i]
        messages.append(spelled)
    if chat.tools:
        listing = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in chat.tools)
        parts = [_TOOLS.format(listing), messages[0]["content"]]
        in_system = messages[0]["role"] != "user"
        messages[0]["content"] = "\n\n".join(part for part in (reversed(parts) if in_system else parts) if part)
    return Chat(messages, None, marks, chat.options)


def _spell(function: JsonObject) -> str:
    return f"<tool_call>\n{json.dumps(function, ensure_ascii=False)}\n</tool_call>"


_TOOLS = (
    "You may call the functions below. To call one, answer with its name and arguments as JSON within "
    "<tool_call></tool_call>.\n<tools>\n{}\n</tools>"
)

_TWO_DAYS = ("2001-02-03T04:05:06", "2014-11-26T17:28:39")
_PLAIN_KEYS = {"role", "content"}
_QUESTION: Message = {"role": "user", "content": "probe question"}
_ANSWER: Message = {"role": "assistant", "content": "probe answer"}
