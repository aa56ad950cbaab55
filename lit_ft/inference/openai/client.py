"""Client of any server with OpenAI's HTTP interface: what it makes of tokens and conversations."""

import json
import math
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from lit_ft.errors import RecipeError

Json = dict[str, object]

_LACKS = (400, 404, 405, 422, 501)
"""Statuses with which servers answer what they do not have; with others, something is wrong."""


class Lacking(Exception):
    """The server does not give what is asked for."""


class OpenAIClient:
    """Connection to a server, without any retry.

    Args:
        url: address of the server, with ``/v1`` at its end or without.
        api_key: key that requests carry.
        timeout: seconds to wait for an answer.
    """

    def __init__(self, url: str, api_key: str | None = None, timeout: float = 120) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise RecipeError(f"url={url!r} is no address of a server; give one such as http://127.0.0.1:8000")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout = timeout

    def models(self) -> list[str]:
        """Names of the server's models.

        Raises:
            RecipeError: there is no server, or it has no such list.
        """
        try:
            listed = self._ask("/v1/models")["data"]
            return [str(model["id"]) for model in listed]  # type: ignore[attr-defined]
        except (Lacking, KeyError, TypeError) as error:
            raise RecipeError(f"{self.url} has no list of models at /v1/models ({error}); is it OpenAI's?") from error

    def prompt_ids(self, model: str, messages: Sequence[Mapping[str, object]], tools: object) -> list[int]:
        """Tokens of a conversation up to the opening of the answer, from ``/tokenize`` or with an answer of one token.

        Raises:
            Lacking: the server gives neither.
            RecipeError: the server cannot be reached, or failed.
        """
        body: Json = {"model": model, "messages": list(messages)} | ({"tools": tools} if tools else {})
        try:
            return _ids(self._ask("/tokenize", body), "tokens")
        except Lacking as first:
            try:
                answer = self._ask("/v1/chat/completions", {**body, "max_tokens": 1, "return_token_ids": True})
                return _ids(answer, "prompt_token_ids")
            except Lacking as second:
                raise Lacking(f"/tokenize: {first}; /v1/chat/completions with return_token_ids: {second}") from second

    def logprobs(self, model: str, ids: Sequence[int]) -> list[float]:
        """Log-probabilities of all tokens but the first.

        Raises:
            Lacking: the server does not score prompts.
            RecipeError: the server cannot be reached, or failed.
        """
        body = {"model": model, "prompt": list(ids), "max_tokens": 0, "echo": True, "logprobs": 1, "temperature": 0}
        choice = self._completion(body)
        logprobs = choice.get("logprobs")
        found = logprobs.get("token_logprobs") if isinstance(logprobs, dict) else None
        values = found[1:] if isinstance(found, list) else []
        if len(values) != len(ids) - 1 or not all(isinstance(one, int | float) for one in values):
            raise Lacking("/v1/completions with echo and logprobs gives no log-probability of each token of the prompt")
        return [float(value) if math.isfinite(value) else math.nan for value in values]

    def greedy_ids(self, model: str, ids: Sequence[int], max_tokens: int) -> list[int]:
        """Tokens of the greedy answer to a prompt, with the one that ends it.

        Raises:
            Lacking: the server does not give the tokens of an answer.
            RecipeError: the server cannot be reached, or failed.
        """
        decoding = {"temperature": 0, "repetition_penalty": 1.0, "max_tokens": max_tokens, "return_token_ids": True}
        return _ids(self._completion({"model": model, "prompt": list(ids), **decoding}), "token_ids")

    def _completion(self, body: Json) -> Json:
        choices = self._ask("/v1/completions", body).get("choices")
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
            raise Lacking("/v1/completions gives no choices")
        return choices[0]

    def _ask(self, path: str, body: Json | None = None) -> Json:
        data = None if body is None else json.dumps(body).encode()
        request = Request(self.url + path, data, self._headers)
        try:
            with urlopen(request, timeout=self._timeout) as answer:
                found = json.load(answer)
        except HTTPError as error:
            said = error.read(500).decode(errors="replace")
            if error.code in _LACKS:
                raise Lacking(f"{error.code} {said}") from error
            raise RecipeError(f"{self.url}{path} answers {error.code}: {said}{_ADVICE.get(error.code, '')}") from error
        except (OSError, HTTPException) as error:  # URLError and timeouts are OSErrors
            raise RecipeError(f"{self.url} does not answer ({error}); start the server, or give its --url") from error
        except ValueError as error:
            raise Lacking(f"{path} answers no JSON") from error
        if not isinstance(found, dict):
            raise Lacking(f"{path} answers no JSON object")
        return found


_ADVICE = {401: "; give its key with --api_key", 403: "; give its key with --api_key"}


def _ids(answer: Json, name: str) -> list[int]:
    ids = answer.get(name)
    if not isinstance(ids, list) or not all(isinstance(one, int) for one in ids):
        raise Lacking(f"the answer has no {name}")
    return ids
