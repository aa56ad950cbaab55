"""Tool calls of an answer's text: found as the text comes, in the form that the chat template gives them."""

import json
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lit_callbacks.protocols import Message
from transformers.utils.chat_parsing import ResponseParser

from lit_ft.data.text.chat_template import ChatTemplate
from lit_ft.data.text.formats import Chat, JsonObject
from lit_ft.data.text.rendering import with_tools
from lit_ft.errors import RecipeError
from lit_ft.inference.opening import OpenedModel

THINKING = ("reasoning_content", "thinking", "reasoning")
"""Names that response templates give to thinking."""
HERMES: JsonObject = {
    "start_anchor": "<tool_call>",  # one is demanded; no prompt is read by this form
    "fields": {
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"content": "text"},
    },
}
"""Form of Hermes' and Qwen's calls, a JSON object with ``name`` and ``arguments``; thinking is left in the text."""


@dataclass
class Parts:
    """Next parts of an answer."""

    text: str = ""
    thinking: str = ""
    calls: list[JsonObject] = field(default_factory=list)
    """Complete calls, as OpenAI's interface has them."""


def response_template(opened: OpenedModel) -> JsonObject | None:
    """Form of a model's answers, for transformers' parser; None where it is not known, so that calls stay text.

    The tokenizer's own ``response_template``, or Hermes' where the chat template writes a call in that form.

    Raises:
        RecipeError: the tokenizer's own is none.
    """
    own = getattr(opened.tokenizer, "response_template", None)
    if own is None:
        return HERMES if is_hermes(opened.template) else None
    try:
        ResponseParser(own, prefix="")
    except (ValueError, TypeError, AttributeError) as error:
        name = opened.tokenizer.name_or_path
        raise RecipeError(
            f"response_template of the tokenizer of {name!r} cannot be used ({error}); take it out of "
            "tokenizer_config.json"
        ) from error
    return dict(own)


def is_hermes(template: ChatTemplate) -> bool:
    """Whether a chat template, or what stands in for it where it renders no tools, writes a call in Hermes' form."""
    function = {"name": "probe_tool", "arguments": {"probe_argument": "probe value"}}
    call = {"type": "function", "id": "call00001", "function": function}
    answer: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
    question: Message = {"role": "user", "content": "probe question"}
    try:
        chat = with_tools(Chat([question, answer]), template, [])
        rendered_call = re.search(r"<tool_call>(.*?)</tool_call>", template.render(chat.messages), re.DOTALL)
        return rendered_call is not None and json.loads(rendered_call[1]) == function
    except Exception:  # a template may raise anything: this one does not render a call without its result
        return False


class ToolCalls:
    """Reader of one answer: gives its text, its thinking and its calls; what is no call stays text."""

    def __init__(self, template: JsonObject, prompt: str, tools: Sequence[JsonObject]) -> None:
        """Begin an answer.

        Args:
            template: form of the answer.
            prompt: rendered prompt, which may have begun the answer.
            tools: tools of the request, by whose schemas arguments that are written as text get their types.
        """
        self._parser: ResponseParser | None = ResponseParser(
            template, prefix="" if template is HERMES else prompt, tools=list(tools)
        )
        self._held = ""
        """Text that the parser has taken, and nothing has come of yet."""
        self.count = 0
        """Number of calls so far."""

    def add(self, text: str) -> Parts:
        """Add text of the answer."""
        parts = Parts()
        for index, character in enumerate(text):  # one by one, so that little is undecided where parsing fails
            if self._parser is None:
                parts.text += text[index:]
                break
            self._held += character
            self._take(parts, self._parser.feed, character)
        return parts

    def end(self) -> Parts:
        """End the answer: a call that is not complete is text."""
        parts = Parts()
        if self._parser is not None:
            self._take(parts, lambda: self._parser.finalize()[1])  # type: ignore[union-attr]
            self._parser = None
        return parts

    def _take(self, parts: Parts, parse: Callable[..., list[JsonObject]], *text: str) -> None:
        try:
            events = parse(*text)
        except (ValueError, RecursionError):  # no JSON where a call should be
            parts.text, self._held, self._parser = parts.text + self._held, "", None
            return
        for event in events:
            name, kind = event["field"], event["type"]
            if kind == "region_chunk" and not event["dirty"]:
                self._held = self._held.removeprefix(str(event["text"])) if name == "content" else ""
                if name == "content":
                    parts.text += str(event["text"])
                elif name in THINKING:
                    parts.thinking += str(event["text"])
            elif kind == "region_close" and name == "tool_calls":
                self._take_calls(parts, event["value"])
            elif kind == "region_close" and name != "content":
                self._held = ""

    def _take_calls(self, parts: Parts, value: object) -> None:
        entries = [_as_call(one) for one in (value if isinstance(value, list) else [value])]
        calls = [call for call in entries if call is not None]
        if len(calls) < len(entries):
            parts.text += self._held
        else:
            parts.calls += [{"index": self.count + number, **call} for number, call in enumerate(calls)]
            self.count += len(calls)
        self._held = ""


def _as_call(value: object) -> JsonObject | None:
    """Call as OpenAI's interface has it; None for what names no function."""
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return None
    arguments = function.get("arguments", {})
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    # Nine letters and digits: templates of Mistral take no other id.
    id = secrets.token_hex(5)[:9]
    return {"id": id, "type": "function", "function": {"name": function["name"], "arguments": arguments}}
