"""Client of servers with OpenAI's HTTP interface or llama.cpp's: tokens, log-probabilities and answers.

What is asked for has several ways, since servers differ: each is tried until one gives it.
"""

import json
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from http.client import HTTPException
from typing import TypeVar
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_ft.data.text.formats import OPTIONS_COLUMN, JsonObject
from lit_ft.errors import RecipeError

Json = dict[str, object]
T = TypeVar("T")

_LACKS = (400, 404, 405, 422, 501)
"""Statuses with which servers answer what they do not have; with others, something is wrong."""

CANDIDATES = 100
"""Most probable tokens that llama.cpp is asked for; a token that is not among them is asked for with all others."""


class Lacking(Exception):
    """Error of a request for something that the server does not offer."""


class ServerFailed(RecipeError):
    """Error of a request that failed on the server, whatever the server offers."""


_VERSION = re.compile(r"/v\d[^/]*(/[^/]+)*$")
"""End of an address that OpenAI's paths follow: ``/v1``, ``/api/v3`` from its version on, ``/v1beta/openai``."""

_BUSY = (408, 409, 425, 429, 500, 502, 503, 504)
"""Statuses of a server that may answer the same request later."""

LONGEST_WAIT = 30.0
"""Seconds to wait before a request is repeated, at most."""


class _TryLater(Exception):
    """Error of a request that may succeed later."""

    def __init__(self, error: RecipeError, seconds: str | None = None) -> None:
        super().__init__(str(error))
        self.error = error
        self.seconds = float(seconds) if seconds and seconds.isdecimal() else None


class OpenAIClient:
    """Connection to a server.

    Args:
        url: address of the server, with OpenAI's ``/v1``, or the version of another provider, at its end or without.
        api_key: key that requests carry.
        timeout: seconds to wait for an answer.
        tries: number of times that a request is sent to a server that is busy or breaks off, with waits of 1, 2, 4,
            ... seconds between them, or those that it asks for (``Retry-After``).
    """

    def __init__(self, url: str, api_key: str | None = None, timeout: float = 120, tries: int = 1) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise RecipeError(f"url={url!r} is no address of a server; give one such as http://127.0.0.1:8000")
        url = url.rstrip("/")
        version = _VERSION.search(url, url.index(parts.netloc) + len(parts.netloc))
        self.url, self._version = (url[: version.start()], version[0]) if version else (url, "/v1")
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout, self._tries = timeout, tries
        self._lacking: dict[str, str] = {}
        self._whole_token: int | None = None

    def models(self) -> list[str]:
        """Names of the server's models.

        Raises:
            ServerFailed: it has no such list.
            RecipeError: there is no server.
        """
        return [str(model["id"]) for model in self._models()]

    def weight_type(self, model: str) -> str | None:
        """Type of a model's weights by llama.cpp's name, e.g. ``Q8_0``; None where the server does not say."""
        try:
            listed = self._models()
        except ServerFailed:  # who names the model needs no list
            return None
        entry = next((one for one in listed if one["id"] == model), {})
        meta = entry.get("meta")
        named = meta.get("ftype") if isinstance(meta, dict) else None
        return str(named).removeprefix("all ") if named else None

    def _models(self) -> list[Json]:
        try:
            listed = self._ask("/v1/models")["data"]
            return [{**model, "id": str(model["id"])} for model in listed]  # type: ignore[attr-defined]
        except (Lacking, KeyError, TypeError) as error:
            where = f"{self.url} has no list of models at {self._version}/models"
            raise ServerFailed(f"{where} ({error}); has it OpenAI's interface?") from error

    def chosen(self, given: str | None, default: str | None = None, option: str = "--model") -> str:
        """Name of a model that the server has.

        Args:
            given: name; None takes the server's only one.
            default: name to take where it has several.
            option: option of the command that gives the name.

        Raises:
            RecipeError: there is no server, or it has no such model.
        """
        try:
            served = self.models()
        except ServerFailed as error:
            if given is None:
                raise RecipeError(f"{error}; without a list of models, name the model with {option}") from error
            rank_zero_warn(f"{option} {given} is taken as it is: {error}")
            return given
        name = given or (served[0] if len(served) == 1 else default)
        if name not in served:
            what = "several models" if name is None else f"no model {name!r}"
            raise RecipeError(f"{self.url} has {what}; give {option} one of {', '.join(served)}")
        return name

    def prompt_ids(
        self, model: str, messages: Sequence[Mapping[str, object]], tools: object, options: JsonObject | None = None
    ) -> list[int]:
        """Tokens of a conversation up to the opening of the answer; ``options`` are variables of the chat template.

        Raises:
            Lacking: the server has no way to give them.
            RecipeError: the server cannot be reached, or failed.
        """
        body: Json = {"model": model, "messages": list(messages)} | ({"tools": tools} if tools else {})
        body |= {OPTIONS_COLUMN: options} if options else {}

        def of_an_answer() -> list[int]:
            answer = self._ask("/v1/chat/completions", {**body, "max_tokens": 1, "return_token_ids": True})
            return _ids(answer, "prompt_token_ids")

        def of_the_text() -> list[int]:
            prompt = self._ask("/apply-template", body).get("prompt")
            if not isinstance(prompt, str):
                raise Lacking("the answer has no prompt")
            return self.text_ids(prompt)

        return self._first_of(
            {
                "/tokenize": lambda: _ids(self._ask("/tokenize", body), "tokens"),
                "/v1/chat/completions with return_token_ids": of_an_answer,
                "/apply-template and /tokenize": of_the_text,
            }
        )

    def text_ids(self, text: str) -> list[int]:
        """Tokens of a text as llama.cpp's server encodes a prompt, with a BOS token where the model begins with one.

        Raises:
            Lacking: the server has no such way.
            RecipeError: the server cannot be reached, or failed.
        """
        return _ids(self._ask("/tokenize", {"content": text, "add_special": True, "parse_special": True}), "tokens")

    def logprobs(self, model: str, ids: Sequence[int], start: int = 1) -> list[float]:
        """Log-probabilities of the tokens from number ``start`` (from 0), each after all before it.

        Raises:
            Lacking: the server has no way to give them.
            RecipeError: the server cannot be reached, or failed.
        """

        def of_an_echo() -> list[float]:
            return _numbers(self._echo(model, ids).get("token_logprobs"), len(ids), start)

        def of_each_prefix() -> list[float]:
            return [self._next_logprob(model, ids[:end], ids[end]) for end in range(start, len(ids))]

        return self._first_of(
            {"/v1/completions with echo and logprobs": of_an_echo, "/completion with n_probs": of_each_prefix}
        )

    def _next_logprob(self, model: str, before: Sequence[int], token: int) -> float:
        logprobs = self.next_logprobs(model, before, CANDIDATES)
        if token not in logprobs and len(logprobs) >= CANDIDATES:
            logprobs = self.next_logprobs(model, before, 2**24)
        return logprobs.get(token, math.nan)

    def next_logprobs(self, model: str, before: Sequence[int], count: int) -> dict[int, float]:
        """Log-probabilities of the most probable next tokens by id, from llama.cpp's ``/completion``.

        Args:
            model: name of the model.
            before: tokens of the prompt.
            count: number of tokens; more than the vocabulary has gives all.

        Raises:
            Lacking: the server has no such way.
            RecipeError: the server cannot be reached, or failed.
        """
        if self._whole_token is None:
            self._whole_token = _ids(self._ask("/tokenize", {"content": "a", "add_special": False}), "tokens")[-1]
        # llama.cpp gives the probabilities without the bias, and none for a token that ends within a character.
        decoding = {"n_predict": 1, "n_probs": count, "temperature": 0, "logit_bias": [[self._whole_token, 10_000]]}
        answer = self._ask("/completion", {"model": model, "prompt": list(before), **decoding})
        first = next(iter(_list_of(answer, "completion_probabilities")), {})
        tokens = first.get("top_logprobs") if isinstance(first, dict) else None
        if not isinstance(tokens, list) or not tokens or not all("id" in one and "logprob" in one for one in tokens):
            raise Lacking("the answer has no log-probabilities by token id")
        # A logit of minus infinity has no number in JSON.
        return {int(one["id"]): math.nan if one["logprob"] is None else float(one["logprob"]) for one in tokens}

    def choices(self, model: str, ids: Sequence[int]) -> tuple[list[float], list[float]]:
        """Log-probabilities of all tokens but the first, and of the most probable token in the place of each.

        Raises:
            Lacking: the server does not score prompts.
            RecipeError: the server cannot be reached, or failed.
        """
        echo = self._echo(model, ids)
        tops = echo.get("top_logprobs")
        if not isinstance(tops, list) or not all(isinstance(one, dict) and one for one in tops[1:]):
            raise Lacking("/v1/completions with echo and logprobs gives no top_logprobs")
        own = _numbers(echo.get("token_logprobs"), len(ids))
        return own, _numbers([None, *(max(one.values()) for one in tops[1:])], len(ids))

    def completion(self, model: str, ids: Sequence[int], **options: object) -> str:
        """Text that follows a prompt's tokens.

        Raises:
            Lacking: the server has no ``/v1/completions``, or refuses an option.
            RecipeError: the server cannot be reached, or failed.
        """
        text = self._completion({"model": model, "prompt": list(ids), **options}).get("text")
        if not isinstance(text, str):
            raise Lacking("/v1/completions gives no text")
        return text

    def greedy_chat(self, model: str, messages: Sequence[Mapping[str, object]], max_tokens: int) -> str:
        """Answer to a conversation at temperature 0; at its own where a model that thinks takes no other.

        Raises:
            Lacking: the server has no ``/v1/chat/completions``, or refuses the conversation.
            RecipeError: the server cannot be reached, or failed.
        """
        return self._first_of(
            {
                "max_tokens, temperature 0": lambda: self.chat(model, messages, max_tokens=max_tokens, temperature=0),
                "max_completion_tokens": lambda: self.chat(model, messages, max_completion_tokens=max_tokens),
            }
        )

    def chat(self, model: str, messages: Sequence[Mapping[str, object]], **options: object) -> str:
        """Answer to a conversation.

        Raises:
            Lacking: the server has no ``/v1/chat/completions``, or refuses an option.
            RecipeError: the server cannot be reached, or failed.
        """
        answer = self._ask("/v1/chat/completions", {"model": model, "messages": list(messages), **options})
        try:
            content = answer["choices"][0]["message"]["content"]  # type: ignore[index]
        except (KeyError, IndexError, TypeError) as error:
            raise Lacking("/v1/chat/completions gives no message") from error
        return content if isinstance(content, str) else ""  # null where a model spends all tokens on thinking

    def greedy_ids(self, model: str, ids: Sequence[int], max_tokens: int) -> list[int]:
        """Tokens of the greedy answer to a prompt, with the one that ends it.

        Raises:
            Lacking: the server does not give the tokens of an answer.
            RecipeError: the server cannot be reached, or failed.
        """
        body: Json = {"model": model, "prompt": list(ids), "temperature": 0}
        openai = {"repetition_penalty": 1.0, "max_tokens": max_tokens, "return_token_ids": True}
        llama_cpp = {"repeat_penalty": 1.0, "n_predict": max_tokens, "return_tokens": True}
        return self._first_of(
            {
                "/v1/completions with return_token_ids": lambda: _ids(self._completion(body | openai), "token_ids"),
                "/completion with return_tokens": lambda: _ids(self._ask("/completion", body | llama_cpp), "tokens"),
            }
        )

    def greedy_text(self, model: str, prompt: str, max_tokens: int) -> tuple[str, bool]:
        """Text of the greedy answer to a prompt, and whether a token ended it.

        Raises:
            Lacking: the server completes no texts.
            RecipeError: the server cannot be reached, or failed.
        """
        choice = self._completion({"model": model, "prompt": prompt, "temperature": 0, "max_tokens": max_tokens})
        text = choice.get("text")
        if not isinstance(text, str):
            raise Lacking("the answer has no text")
        return text, choice.get("finish_reason") == "stop"

    def ends_at(self, token: int) -> bool:
        """Whether llama.cpp's server ends an answer at a token, which it is made to write.

        Raises:
            Lacking: the server has no such way.
            RecipeError: the server cannot be reached, or failed.
        """
        body: Json = {"prompt": [token], "n_predict": 2, "temperature": 0, "logit_bias": [[token, 10_000]]}
        return self._ask("/completion", body).get("stop_type") == "eos"

    def _first_of(self, ways: Mapping[str, Callable[[], T]]) -> T:
        """Result of the first way that the server has; once one has worked, those that it lacks are not tried again."""
        refused = {name: self._lacking[name] for name in ways if name in self._lacking}
        for name, way in ways.items():
            if name in refused:
                continue
            try:
                result = way()
            except Lacking as error:
                refused[name] = str(error)
                continue
            self._lacking |= refused  # where all fail, it may be for this request, and others may be under way
            return result
        raise Lacking("; ".join(f"{name}: {refused[name]}" for name in ways))

    def _echo(self, model: str, ids: Sequence[int]) -> Json:
        body = {"model": model, "prompt": list(ids), "max_tokens": 0, "echo": True, "logprobs": 1, "temperature": 0}
        logprobs = self._completion(body).get("logprobs")
        return logprobs if isinstance(logprobs, dict) else {}

    def _completion(self, body: Json) -> Json:
        choices = self._ask("/v1/completions", body).get("choices")
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
            raise Lacking("the answer has no choices")
        return choices[0]

    def _ask(self, path: str, body: Json | None = None) -> Json:
        tried, tries = 0, 1 if body is None else self._tries
        while True:
            try:
                return self._ask_once(path, body)
            except _TryLater as later:
                tried += 1
                if tried >= tries:
                    raise later.error from later
                seconds = min(2.0 ** (tried - 1) if later.seconds is None else later.seconds, LONGEST_WAIT)
                rank_zero_warn(f"{later}; asked again in {seconds:.0f} s")
                time.sleep(seconds)

    def _ask_once(self, path: str, body: Json | None) -> Json:
        if path.startswith("/v1/"):
            path = self._version + path.removeprefix("/v1")
        data = None if body is None else json.dumps(body).encode()
        request = Request(self.url + path, data, self._headers)
        try:
            with urlopen(request, timeout=self._timeout) as answer:
                body_of_answer = json.load(answer)
        except HTTPError as error:
            reason = error.read(500).decode(errors="replace")
            if error.code in _LACKS:
                raise Lacking(f"{error.code} {reason}") from error
            message = f"{self.url}{path} answers {error.code}: {reason}{_ADVICE.get(error.code, '')}"
            if error.code in _BUSY:
                raise _TryLater(ServerFailed(message), error.headers.get("Retry-After")) from error
            raise ServerFailed(message) from error
        except (OSError, HTTPException) as error:  # URLError and timeouts are OSErrors
            silent = RecipeError(f"{self.url} does not answer ({error}); start the server, or give its --url")
            is_there = isinstance(error, TimeoutError | ConnectionResetError | HTTPException)
            raise _TryLater(silent) if is_there else silent from error
        except ValueError as error:
            raise Lacking(f"{path} answers no JSON") from error
        if not isinstance(body_of_answer, dict):
            raise Lacking(f"{path} answers no JSON object")
        return body_of_answer


_ADVICE = {
    401: "; give its key (--api_key_file, --judge_api_key_file)",
    403: "; give its key (--api_key_file, --judge_api_key_file)",
}


def _list_of(answer: Json, name: str) -> list[object]:
    values = answer.get(name)
    return values if isinstance(values, list) else []


def _numbers(values: object, tokens: int, start: int = 1) -> list[float]:
    """Log-probabilities of the tokens from number ``start`` (from 0); what is not finite is NaN."""
    rest = values[start:] if isinstance(values, list) else []
    if len(rest) != tokens - start or not all(isinstance(one, int | float) for one in rest):
        raise Lacking("the answer has no log-probability of each token of the prompt")
    return [float(value) if math.isfinite(value) else math.nan for value in rest]


def _ids(answer: Json, name: str) -> list[int]:
    ids = _list_of(answer, name)
    if not ids or not all(isinstance(one, int) for one in ids):
        raise Lacking(f"the answer has no {name}")
    return [one for one in ids if isinstance(one, int)]
