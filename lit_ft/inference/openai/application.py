"""The server's application: OpenAI's routes over engines, with limits and errors as JSON."""

import asyncio
import json
import socket
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from lit_ft.inference.continuous_batching import Engine, Generation, Unavailable, score
from lit_ft.inference.openai.access import check_json, check_key, check_source
from lit_ft.inference.openai.answers import Delta, Format, deltas, merged, with_calls
from lit_ft.inference.openai.requests import (
    Ask,
    Fields,
    Json,
    RequestError,
    chat_prompt,
    read_chat,
    read_completion,
    shown,
    text_prompts,
)
from lit_ft.inference.openai.tool_calls import ToolCalls, response_template
from lit_ft.inference.token_choice import TokenChoice
from lit_ft.model.generation import stop_ids

T = TypeVar("T")


@dataclass(frozen=True)
class Limits:
    """Limits on requests."""

    max_model_len: int
    """Largest number of tokens of a prompt and its answer."""
    max_requests: int = 64
    """Largest number of answers that are generated or wait."""
    max_body_bytes: int = 4 * 2**20
    api_key: str | None = None
    """Key that requests must carry; None takes all."""
    origins: Sequence[str] = ()
    """Origins whose pages a browser lets use the server; ``*`` is all."""
    is_on_loopback: bool = True
    """Whether only this machine reaches the server: without a key, requests must then be for localhost."""


class Service:
    """Handlers of the routes."""

    def __init__(self, engines: Mapping[str, Engine], limits: Limits, roots: Mapping[str, str]) -> None:
        self._engines, self._limits, self._roots = engines, limits, roots
        self._forms = {name: response_template(engine.opened) for name, engine in engines.items()}
        self._running = 0

    async def health(self, request: Request) -> Response:
        """Answer 200 while answers can be generated."""
        dead = [name for name, engine in self._engines.items() if not engine.is_alive()]
        if dead:
            raise RequestError(f"{', '.join(dead)}: generation has ended; start the server again", 503)
        return JSONResponse({"status": "ok", "running": self._running})

    async def models(self, request: Request) -> Response:
        """List the models."""
        return JSONResponse({"object": "list", "data": list(map(self._described, self._engines))})

    async def model(self, request: Request) -> Response:
        """Describe one model."""
        return JSONResponse(self._described(self._known(request.path_params["name"])))

    def _described(self, name: str) -> Json:
        return {
            "id": name,
            "object": "model",
            "created": 0,
            "owned_by": "lit_ft",
            "root": self._roots[name],
            "max_model_len": self._limits.max_model_len,
        }

    async def tokenize(self, request: Request) -> Response:
        """Tokens of a prompt or a conversation, as vLLM's route of that name gives them."""
        fields = await self._fields(request)
        _, engine = self._engine(fields)
        add_special_tokens = fields.take("add_special_tokens", bool, True)
        if (text := fields.find("prompt", str)) is not None:
            (ids,) = await text_prompts(text, engine.opened.tokenizer, add_special_tokens)
        else:
            ids, _ = await chat_prompt(fields, engine.opened)
        fields.end()
        return JSONResponse({"count": len(ids), "max_model_len": self._limits.max_model_len, "tokens": ids})

    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        fields = await self._fields(request)
        name, engine = self._engine(fields)
        ask = await read_chat(fields, name, engine.opened, self._limits.max_model_len)
        fields.end()
        return await self._answer(request, engine, ask, is_chat=True)

    async def completion(self, request: Request) -> Response:
        """Continue a text."""
        fields = await self._fields(request)
        name, engine = self._engine(fields)
        ask = await read_completion(fields, name, engine.opened, self._limits.max_model_len)
        fields.end()
        return await self._answer(request, engine, ask, is_chat=False)

    async def _fields(self, request: Request) -> Fields:
        """Body of a request, read up to the limit."""
        check_json(request.headers)
        limit, body = self._limits.max_body_bytes, b""
        async for piece in request.stream():
            body += piece
            if len(body) > limit:
                raise RequestError(f"the body has more than {limit:,} bytes", 413)
        try:
            text = body.decode("utf-8-sig")  # json.loads of bytes would take halves of pairs, and other encodings
            values = json.loads(text)
            if "\\ud" in text.lower():
                json.dumps(values, ensure_ascii=False).encode()  # refuses halves of pairs, which are no characters
        except UnicodeEncodeError as error:
            half = error.object[error.start].encode("ascii", "backslashreplace").decode()
            raise RequestError(
                f"the body has {half}, one half of a surrogate pair, which is no character; write both halves, or UTF-8"
            ) from error
        except (ValueError, RecursionError) as error:
            raise RequestError(f"the body is no JSON: {error}") from error
        if not isinstance(values, dict):
            raise RequestError("the body must be a JSON object")
        return Fields(values)

    def _engine(self, fields: Fields) -> tuple[str, Engine]:
        name = fields.find("model", str)
        if name is None:
            raise RequestError(f"the field model is missing; give one of {', '.join(self._engines)}")
        return self._known(name), self._engines[name]

    def _known(self, name: str) -> str:
        if name not in self._engines:
            raise RequestError(
                f"there is no model {shown(name)}; there are {', '.join(self._engines)}", 404, "model_not_found"
            )
        return name

    async def _answer(self, request: Request, engine: Engine, ask: Ask, is_chat: bool) -> Response:
        count = len(ask.prompts) * ask.n
        if count > self._limits.max_requests:  # clients try again after 429, and this will never fit
            raise RequestError(f"the request asks for {count:,} answers; ask for {self._limits.max_requests} at most")
        if self._running + count > self._limits.max_requests:
            raise RequestError(
                f"{self._running} answers are generated or wait, and {count} more exceed {self._limits.max_requests}; "
                "try again later",
                429,
            )
        id = f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        form = Format(ask, id, engine.opened.tokenizer, is_chat)
        self._running += count  # here, and not when the first token is asked for: others may come before that
        if ask.stream:
            return _Stream(self._events(engine, ask, id, form), partial(self._end, count))
        try:
            return JSONResponse(form.whole(await _unless_disconnected(request, self._whole(engine, ask, id))))
        finally:
            self._end(count)

    def _end(self, count: int) -> None:
        self._running -= count

    def _parts(self, engine: Engine, ask: Ask, id: str) -> AsyncIterator[tuple[int, Delta]]:
        opened = engine.opened
        config = ask.decoding.generation_config(opened)
        stops = stop_ids(opened.base, opened.tokenizer)
        seed, form, streams = ask.decoding.seed, self._forms[ask.model], []
        for index in range(len(ask.prompts) * ask.n):
            prompt = ask.prompts[index // ask.n]
            # The first answer has the request's own seed, so that it is the one that it is alone.
            choice = TokenChoice(prompt, config, None if seed is None else seed + index % ask.n, ask.top_logprobs)
            generation = Generation(f"{id}-{index}", prompt, ask.decoding.max_new_tokens, stops, choice)
            parts = deltas(engine, generation, ask.stops)
            if ask.tools and form is not None:
                text = opened.tokenizer.decode(prompt, skip_special_tokens=False)
                parts = with_calls(parts, ToolCalls(form, text, ask.tools))
            streams.append(parts)
        return merged(streams)

    async def _whole(self, engine: Engine, ask: Ask, id: str) -> list[Delta]:
        answers = [Delta() for _ in range(len(ask.prompts) * ask.n)]
        if ask.is_scored_only:
            for answer in answers:
                answer.finish_reason = "length"
        else:
            async for index, part in self._parts(engine, ask, id):
                answers[index].add(part)
        if ask.echo:
            answers = [await _echoed(engine, ask, index, answer) for index, answer in enumerate(answers)]
        return answers

    async def _events(self, engine: Engine, ask: Ask, id: str, form: Format) -> AsyncIterator[str]:
        answers = [Delta() for _ in range(len(ask.prompts) * ask.n)]
        try:
            for chunk in form.opening(len(answers)):
                yield _event(chunk)
            async for index, part in self._parts(engine, ask, id):
                yield _event(form.chunk(index, part, is_first=not answers[index].ids))
                answers[index].add(part)
            if ask.include_usage:
                yield _event(form.usage_chunk(answers))
        except RuntimeError as error:
            yield _event(_error_body(str(error), _status_of(error), None))
        yield "data: [DONE]\n\n"


class _Stream(StreamingResponse):
    """Events that call a function at their end, also where the client is gone before the first."""

    def __init__(self, events: AsyncIterator[str], at_end: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._at_end = at_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._at_end()


async def _echoed(engine: Engine, ask: Ask, index: int, answer: Delta) -> Delta:
    """An answer with its prompt, and its tokens' log-probabilities, in front of it."""
    prompt = ask.prompts[index // ask.n]
    whole = Delta(engine.opened.tokenizer.decode(prompt, skip_special_tokens=False), list(prompt))
    if ask.top_logprobs is not None and len(prompt) > 1:
        whole.logprobs = await asyncio.to_thread(score, engine.opened, prompt, ask.top_logprobs)
    whole.add(answer)
    return whole


async def _unless_disconnected(request: Request, work: Awaitable[T]) -> T:
    """Result of some work, which is cancelled when the client is gone.

    Raises:
        ClientDisconnect: the client is gone.
    """

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise ClientDisconnect
        return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()


def application(engines: Mapping[str, Engine], limits: Limits, roots: Mapping[str, str]) -> Starlette:
    """Application that answers requests.

    Args:
        engines: engine of each model, by the model's name.
        limits: what the server takes.
        roots: folder or hub id of each model, by the model's name.
    """
    service = Service(engines, limits, roots)

    def guarded(handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def handle(request: Request) -> Response:
            if limits.api_key is not None:
                check_key(request.headers, limits.api_key)
            else:
                check_source(request.headers, limits.origins, limits.is_on_loopback)
            return await handler(request)

        return handle

    routes: Sequence[tuple[str, str, Callable[[Request], Awaitable[Response]]]] = (
        ("/health", "GET", service.health),
        ("/v1/models", "GET", guarded(service.models)),
        ("/v1/models/{name:path}", "GET", guarded(service.model)),
        ("/v1/chat/completions", "POST", guarded(service.chat)),
        ("/v1/completions", "POST", guarded(service.completion)),
        ("/tokenize", "POST", guarded(service.tokenize)),
    )
    cors = Middleware(
        CORSMiddleware,
        allow_origins=limits.origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        allow_private_network=True,
    )
    return Starlette(
        middleware=[cors],
        routes=[Route(path, handler, methods=[method]) for path, method, handler in routes],
        exception_handlers={
            RequestError: _refused,
            HTTPException: _no_route,
            RuntimeError: _failed,
            Exception: _failed,
            ClientDisconnect: _nobody_listens,
        },
    )


class GracefulServer(uvicorn.Server):
    """HTTP server that, at SIGINT or SIGTERM, gives running answers some seconds to end; a second one ends them."""

    def __init__(self, app: Starlette, engines: Iterable[Engine], stop_seconds: float) -> None:
        super().__init__(uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off"))
        self._engines, self._stop_seconds = list(engines), stop_seconds
        self._is_hurried = asyncio.Event()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop the server, or, if it stops already, end the answers at once."""
        if self.should_exit:
            self._is_hurried.set()  # uvicorn would cancel the handlers, and log a traceback for each
        else:
            super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no more requests, and wait for those that run."""
        ending = asyncio.create_task(self._end_requests())
        await super().shutdown(sockets)
        ending.cancel()

    async def _end_requests(self) -> None:
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._is_hurried.wait(), self._stop_seconds)
        for engine in self._engines:
            engine.end_answers()
        await asyncio.sleep(1)
        # What is left waits for a client that sends no more of its request, or reads no more of its answer.
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def _event(body: Json) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"


def _error_body(message: str, status: int, code: str | None) -> Json:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": code or status}}


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    headers = {"Retry-After": "1"} if error.status == 429 else None
    return JSONResponse(_error_body(str(error), error.status, error.code), error.status, headers)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    return JSONResponse(_error_body(message, error.status_code, None), error.status_code, error.headers)


async def _failed(_: Request, error: Exception) -> Response:
    status = _status_of(error)
    return JSONResponse(_error_body(str(error) or type(error).__name__, status, None), status)


def _status_of(error: Exception) -> int:
    return 503 if isinstance(error, Unavailable) else 500


async def _nobody_listens(_: Request, error: Exception) -> Response:
    return Response(status_code=499)
