"""Bodies of requests, read and checked: what is not supported is refused by name, never ignored."""

import asyncio
import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from lit_callbacks.protocols import Message
from transformers import PreTrainedTokenizerBase

from lit_ft.data.text import formats
from lit_ft.data.text.chat_template import ChatTemplate
from lit_ft.data.text.formats import JsonObject
from lit_ft.data.text.rendering import prompt_of
from lit_ft.errors import BadRow, RecipeError
from lit_ft.inference.opening import OpenedModel
from lit_ft.inference.text_stream import Decoding

Json = dict[str, object]
T = TypeVar("T", bool, int, float, str, list[object], dict[str, object])

MAX_TOP_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1_000
"""Longest stop string: each token's text is compared with all beginnings of it."""
_NOTHING_TO_DO = frozenset(["user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"])
"""Fields that do not concern the answer."""
_ONLY: Mapping[str, tuple[object, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "best_of": (1,),
    "suffix": ("",),
    "functions": ([],),
    "parallel_tool_calls": (True,),
    # vLLM's, which its clients send with their defaults.
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),  # of a chat: the template writes them
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "continue_final_message": (False,),
    "documents": ([],),
    "early_stopping": (False,),
    "echo": (False,),
    "ignore_eos": (False,),
    "include_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "min_tokens": (0,),
    "priority": (0,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True, False),  # docs/after_fit.md says which tokens a text has
    "spaces_between_special_tokens": (True,),
    "stop_token_ids": ([],),
    "use_beam_search": (False,),
}
"""Fields of which one value alone can be had, or whose values change nothing."""
_SENT_BACK = frozenset(["name", "tool_call_id", "refusal", "annotations"])
"""Keys of OpenAI's messages that a template need not use: whose turn it is, and what answers of other servers have."""
_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 200


def shown(value: object) -> str:
    """Value of a request as its error shows it: not all of one that is long, or nested deeper than recursion goes."""
    return _REPR.repr(value)


class RequestError(Exception):
    """A request that is refused, with its HTTP status and OpenAI's error code."""

    def __init__(self, message: str, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class Fields:
    """Fields of a body, each taken once; what is left over at the end is refused."""

    def __init__(self, values: Json) -> None:
        self._values = {name: value for name, value in values.items() if value is not None}

    def take(self, name: str, kind: type[T], default: T) -> T:
        """Value of a field, or the default.

        Raises:
            RequestError: it has another type.
        """
        value = self.find(name, kind)
        return default if value is None else value

    def find(self, name: str, kind: type[T]) -> T | None:
        """Value of a field; None if it is not given.

        Raises:
            RequestError: it has another type.
        """
        value = self._values.pop(name, None)
        if value is None:
            return None
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value) if abs(value) < 1e300 else math.inf
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise RequestError(f"{name}={shown(value)} must be {_KINDS[kind]}")
        return value

    def given(self, name: str) -> object:
        """Value of a field of any type; None if it is not given."""
        return self._values.pop(name, None)

    def end(self) -> None:
        """Refuse what was not taken.

        Raises:
            RequestError: a field is not supported, or has a value that is not.
        """
        for name, value in self._values.items():
            if name in _NOTHING_TO_DO or any(_is_same(value, one) for one in _ONLY.get(name, ())):
                continue
            raise RequestError(
                f"{name:.200}={shown(value)} is not supported by this server; leave it out", code="unsupported"
            )


def _is_same(value: object, other: object) -> bool:
    """Whether values of JSON are equal: false is not 0 there, and 0.0 is."""
    return value == other and isinstance(value, bool) is isinstance(other, bool)


_KINDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "an object",
}


@dataclass(frozen=True)
class Ask:
    """Request of one or more answers."""

    model: str
    prompts: list[list[int]]
    """Tokens of each prompt."""
    decoding: Decoding
    stops: list[str]
    n: int
    """Answers to each prompt."""
    top_logprobs: int | None
    """Number of alternatives whose log-probabilities are asked for beside each token's; None asks for none at all."""
    stream: bool
    include_usage: bool
    return_token_ids: bool
    echo: bool = False
    """Whether the answer begins with the prompt."""
    tools: list[JsonObject] | None = None
    """Tools that the model may call."""
    is_scored_only: bool = False
    """Whether nothing is generated (``max_tokens=0``)."""


async def read_chat(fields: Fields, model: str, opened: OpenedModel, max_model_len: int) -> Ask:
    """Read a request of ``/v1/chat/completions``.

    Raises:
        RequestError: a field is missing, wrong or not supported.
    """
    prompt, tools = await chat_prompt(fields, opened)
    limit, older = fields.find("max_completion_tokens", int), fields.find("max_tokens", int)
    if None not in (limit, older) and limit != older:
        raise RequestError(f"max_completion_tokens={limit} and max_tokens={older} are the same limit; leave one out")
    top = fields.find("top_logprobs", int)
    if not fields.take("logprobs", bool, False):
        if top is not None:
            raise RequestError(f"top_logprobs={top} needs logprobs=true")
    else:
        top = top or 0
    limit = older if limit is None else limit
    return replace(_ask(fields, model, [prompt], limit, max_model_len, top), tools=tools)


async def read_completion(fields: Fields, model: str, opened: OpenedModel, max_model_len: int) -> Ask:
    """Read a request of ``/v1/completions``.

    Raises:
        RequestError: a field is missing, wrong or not supported.
    """
    add_special_tokens = fields.take("add_special_tokens", bool, True)
    prompts = await text_prompts(fields.given("prompt"), opened.tokenizer, add_special_tokens)
    echo = fields.take("echo", bool, False)
    limit = fields.take("max_tokens", int, 16)
    return _ask(fields, model, prompts, limit, max_model_len, fields.find("logprobs", int), echo)


def _ask(
    fields: Fields,
    model: str,
    prompts: list[list[int]],
    limit: int | None,
    max_model_len: int,
    top: int | None,
    echo: bool = False,
) -> Ask:
    longest = max(map(len, prompts))
    room = max_model_len - longest
    if room < (0 if limit == 0 else 1) or (limit or 0) > room:
        raise RequestError(
            f"the prompt has {longest:,} tokens and max_tokens is {'not set' if limit is None else f'{limit:,}'}; this "
            f"server takes {max_model_len:,} tokens for both",
            code="context_length_exceeded",
        )
    stream, given = fields.take("stream", bool, False), fields.find("stream_options", dict)
    if given is not None and not stream:
        raise RequestError("stream_options needs stream=true; leave it out")
    options = Fields(given or {})
    include_usage = options.take("include_usage", bool, False)
    options.end()
    n = fields.take("n", int, 1)
    if n < 1:
        raise RequestError(f"n={n} must be 1 or more")
    if top is not None and not 0 <= top <= MAX_TOP_LOGPROBS:
        raise RequestError(f"{top} log-probabilities of alternatives are asked for; ask for 0 to {MAX_TOP_LOGPROBS}")
    if echo and stream:
        raise RequestError("echo is not supported with stream; leave one of them out")
    if limit == 0 and not echo:
        raise RequestError("max_tokens=0 must be 1 or more; 0 is for echo, which scores the prompt")
    return Ask(
        model,
        prompts,
        _decoding(fields, room if limit is None else limit),
        _stops(fields.given("stop")),
        n,
        top,
        stream,
        include_usage,
        fields.take("return_token_ids", bool, False),
        echo,
        is_scored_only=limit == 0,
    )


def _decoding(fields: Fields, limit: int) -> Decoding:
    top_k = fields.find("top_k", int)
    try:
        return Decoding(
            max(limit, 1) if limit >= 0 else limit,
            fields.find("temperature", float),
            fields.find("top_p", float),
            0 if top_k == -1 else top_k,  # no limit, as vLLM writes it
            fields.find("repetition_penalty", float),
            fields.find("seed", int),
            fields.find("min_p", float),
        )
    except RecipeError as error:
        raise RequestError(str(error).replace("max_new_tokens", "max_tokens")) from error


def _stops(value: object) -> list[str]:
    stops = [value] if isinstance(value, str) else ([] if value is None else value)
    if not isinstance(stops, list) or not all(isinstance(one, str) and one for one in stops):
        raise RequestError(f"stop={shown(value)} must be text, or a list of texts, none of them empty")
    if len(stops) > MAX_STOPS:
        raise RequestError(f"stop has {len(stops)} texts; give {MAX_STOPS} at most")
    if (longest := max(map(len, stops), default=0)) > MAX_STOP_CHARACTERS:
        raise RequestError(
            f"stop has a text of {longest:,} characters; give texts of {MAX_STOP_CHARACTERS:,} characters at most"
        )
    return stops


async def chat_prompt(fields: Fields, opened: OpenedModel) -> tuple[list[int], list[JsonObject] | None]:
    """Tokens of a conversation, rendered as in training, up to the opening of the assistant's turn; and its tools.

    Raises:
        RequestError: the conversation is malformed, or the template does not render it.
    """
    messages, tools = fields.take("messages", list, []), fields.find("tools", list)
    template = _template(fields.take(formats.OPTIONS_COLUMN, dict, {}), opened)
    choice = fields.given("tool_choice")
    if choice not in (None, "auto", "none"):
        raise RequestError(
            f"tool_choice={shown(choice)} is not supported by this server; leave it out, or ask for auto"
        )
    if not messages or (isinstance(messages[-1], dict) and messages[-1].get("role") == "assistant"):
        raise RequestError("messages must be a list of turns that ends with one of the user or a tool")
    # The reader of training rows wants an answer; no prompt depends on it.
    row: Json = {"messages": [*messages, {"role": "assistant", "content": "?"}]}
    if tools and choice != "none":
        row["tools"] = tools
    try:
        chat = formats.messages(row, may_be_empty=True)  # clients send back an answer that was empty
        _check_messages(chat.messages, template)
        prompt, _ = prompt_of(chat, template)
    except (BadRow, RecipeError) as error:
        raise RequestError(str(error)) from error
    return await _encoded(prompt, opened.tokenizer, False), chat.tools


def _check_messages(messages: Sequence[Message], template: ChatTemplate) -> None:
    """Refuse what no prompt would show: keys that nothing reads, and results of calls that are not there."""
    calls: list[object] = []
    for number, message in enumerate(messages, 1):
        for key in message.keys() - formats.READ_KEYS - _SENT_BACK:
            if message[key] not in formats.EMPTY and not template.uses(key):
                raise RequestError(
                    f"messages item {number}: {key!r:.200} is read by neither this server nor the chat template; leave "
                    "it out",
                    code="unsupported",
                )
        if "tool_calls" in message:
            calls = [call["id"] for call in message["tool_calls"] if "id" in call]
        if calls and (answered := message.get("tool_call_id")) is not None and answered not in calls:
            raise RequestError(
                f"messages item {number}: tool_call_id={shown(answered)} is none of the calls before it; there are "
                f"{shown(calls)}"
            )


def _template(options: Json, opened: OpenedModel) -> ChatTemplate:
    try:
        return opened.template.with_options(options)
    except RecipeError as error:
        raise RequestError(str(error).replace("data.template_options", formats.OPTIONS_COLUMN)) from error


async def text_prompts(
    value: object, tokenizer: PreTrainedTokenizerBase, add_special_tokens: bool = True
) -> list[list[int]]:
    """Tokens of one or several prompts, each given as text or as tokens.

    Raises:
        RequestError: it is neither, or a token is not in the vocabulary.
    """
    given = value if isinstance(value, list) and value and not isinstance(value[0], int) else [value]
    prompts = []
    for one in given:
        if isinstance(one, str):
            ids = await _encoded(one, tokenizer, add_special_tokens)
        elif isinstance(one, list) and all(type(token) is int and 0 <= token < len(tokenizer) for token in one):
            ids = one
        else:
            raise RequestError(f"prompt must be text or a list of tokens below {len(tokenizer):,}, or a list of these")
        if not ids:
            raise RequestError("prompt is empty; give it at least one token")
        prompts.append(ids)
    return prompts


async def _encoded(text: str, tokenizer: PreTrainedTokenizerBase, add_special_tokens: bool) -> list[int]:
    """Tokens of a text, encoded beside the event loop: megabytes take seconds, in which other answers go on."""
    # verbose would warn of a text beyond the model's positions, which is refused.
    encode = partial(tokenizer, text, add_special_tokens=add_special_tokens, verbose=False)
    return list((await asyncio.to_thread(encode))["input_ids"])
