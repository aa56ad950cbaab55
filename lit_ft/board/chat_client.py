"""Streamed answers of a server with OpenAI's HTTP interface."""

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from lit_ft.errors import RecipeError

Message = Mapping[str, str]


@dataclass(frozen=True)
class Piece:
    """A part of an answer.

    Attributes:
        text: text to append.
        ended: why the answer ended, ``stop`` or ``length``; None before its end.
    """

    text: str
    ended: str | None = None


class ChatClient:
    """Connection to a server.

    Args:
        address: address without ``/v1``.
        key: key that requests carry.
    """

    def __init__(self, address: str, key: str) -> None:
        self._address = address
        # Not by a proxy of the environment: the server is this machine's.
        self._client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {key}"}, timeout=httpx.Timeout(600, connect=10), trust_env=False
        )

    async def models(self) -> list[str]:
        """Names of the server's models, the base first.

        Raises:
            RecipeError: the server does not answer.
        """
        try:
            response = await self._client.get(f"{self._address}/v1/models")
            response.raise_for_status()
        except httpx.HTTPError as error:
            raise _unreachable(error) from error
        return [str(model["id"]) for model in response.json()["data"]]

    async def answer(
        self, model: str, messages: Sequence[Message], sampling: Mapping[str, object]
    ) -> AsyncIterator[Piece]:
        """Stream an answer; a caller that stops to read stops the answer.

        Args:
            model: name of the model.
            messages: conversation.
            sampling: further fields of the request.

        Raises:
            RecipeError: the server refuses the request, or has ended.
        """
        body = {"model": model, "messages": list(messages), "stream": True, **sampling}
        url = f"{self._address}/v1/chat/completions"
        try:
            async with self._client.stream("POST", url, json=body) as response:
                if response.status_code != 200:
                    raise RecipeError(_reason(await response.aread(), response.status_code))
                async for line in response.aiter_lines():
                    if line.startswith("data: ") and line != "data: [DONE]":
                        yield _piece(line.removeprefix("data: "))
        except httpx.HTTPError as error:
            raise _unreachable(error) from error

    async def close(self) -> None:
        """Close the connection."""
        await self._client.aclose()


async def all_ended(*answers: Coroutine[Any, Any, None]) -> None:
    """Run answers at once, until all have ended: no question follows while one of them goes on.

    Raises:
        Exception: the error of the first answer that failed.
    """
    for error in await asyncio.gather(*answers, return_exceptions=True):
        if error is not None:
            raise error


def _unreachable(error: httpx.HTTPError) -> RecipeError:
    return RecipeError(f"the server does not answer ({type(error).__name__}); load the model again")


def _piece(data: str) -> Piece:
    content = json.loads(data)
    if "error" in content:
        raise RecipeError(str(content["error"].get("message", content["error"])))
    choice = (content.get("choices") or [{}])[0]
    return Piece(choice.get("delta", {}).get("content") or "", choice.get("finish_reason"))


def _reason(body: bytes, status: int) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answers with status {status}"
