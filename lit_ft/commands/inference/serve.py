"""The ``serve`` command: trained models behind OpenAI's HTTP interface."""

import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lit_callbacks.output.quantities import as_count

from lit_ft.commands.inference.keys import API_KEY, given_key
from lit_ft.commands.inference.listening import LOOPBACK, address_of, listening
from lit_ft.errors import RecipeError, check_installed
from lit_ft.inference.continuous_batching import Engine, batching_obstacle, cache_tokens_in, start_engine
from lit_ft.inference.opening import BASE, OpenedModel, open_together
from lit_ft.inference.text_stream import positions
from lit_ft.inference.vllm_command import vllm_command
from lit_ft.recipe.parser import RecipeParser
from lit_ft.run.folder import LAST
from lit_ft.training.console import show_progress_on_terminals_only

if TYPE_CHECKING:  # of the extra `serve`
    from lit_ft.inference.openai.application import Limits

STOP_SECONDS = 5
"""Seconds that running answers get to end when the server is stopped."""
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/?#@\sA-Z]+")


def run(arguments: list[str]) -> None:
    """Serve trained models through OpenAI's HTTP interface; adapters share one base."""
    show_progress_on_terminals_only()
    parser = RecipeParser(prog="python -m lit_ft serve", description=(run.__doc__ or ""))
    parser.add_argument("paths", nargs="+", help="runs' folders, adapters', models', or hub ids")
    parser.add_argument("--ckpt_path", default=LAST, help="checkpoint of the runs: last, best or a path")
    parser.add_argument("--base", type=str | None, help="base model of adapters' folders")
    parser.add_argument("--chat_template", type=str | None, help="in place of the tokenizer's or the run's")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 is all of the machine's")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    parser.add_argument(
        "--api_key_file", type=str | None, help=f"file with the key that requests must carry; or {API_KEY}"
    )
    parser.add_argument("--api_key", type=str | None, help="the key itself, which other users of the machine see")
    parser.add_argument(
        "--origin",
        action="append",
        default=[],
        metavar="URL",
        help="origin whose web pages may use the server, e.g. http://localhost:3000; repeatable; * is any page",
    )
    parser.add_argument(
        "--max_model_len",
        type=int | None,
        help="tokens of a prompt and its answer; by default the model's positions, or what the cache holds",
    )
    parser.add_argument("--max_requests", type=int, default=64, help="answers that are generated or wait")
    parser.add_argument("--max_body_mib", type=float, default=4.0, help="size of a request's body")
    parser.add_argument("--cache_gib", type=float, default=1.0, help="KV cache of all models together")
    options = parser.parse_args(arguments[1:])
    _check(options.max_requests, options.max_body_mib, options.cache_gib, options.origin)
    api_key = given_key("api_key", options.api_key, options.api_key_file, API_KEY)
    with listening(options.host, options.port) as listener:
        opened = open_together(options.paths, options.ckpt_path, options.base, options.chat_template)
        cache_tokens, max_model_len = _lengths(opened, options.cache_gib, options.max_model_len)

        from lit_ft.inference.openai.application import GracefulServer, Limits, application

        body = int(options.max_body_mib * 2**20)
        is_local = options.host in LOOPBACK
        limits = Limits(max_model_len, options.max_requests, body, api_key, options.origin, is_local)
        # No more than all answers together can fill.
        most = (max_model_len + 64) * options.max_requests
        with _engines(opened, {name: min(most, size) for name, size in cache_tokens.items()}, limits) as engines:
            named = dict(zip((name for name in opened if name != BASE), options.paths, strict=True))
            _print_start(engines, named, limits, options.host, listener)
            roots = {name: named.get(name, engine.opened.pretrained) for name, engine in engines.items()}
            app = application(engines, limits, roots)
            GracefulServer(app, engines.values(), STOP_SECONDS).run(sockets=[listener])


def _check(max_requests: int, max_body_mib: float, cache_gib: float, origins: Sequence[str]) -> None:
    check_installed("serve needs", "serve", "starlette", "uvicorn")
    if max_requests < 1:
        raise RecipeError(f"max_requests={max_requests} must be 1 or more")
    for name, value in (("max_body_mib", max_body_mib), ("cache_gib", cache_gib)):
        if not 0 < value < float("inf"):
            raise RecipeError(f"{name}={value:g} must be over 0")
    for origin in origins:
        if not _ORIGIN.fullmatch(origin):
            raise RecipeError(
                f"origin={origin!r} must be as a browser's header Origin gives it: scheme://host, or with a :port, "
                "in lower case and without a path; null is that of a file, * is any"
            )


def _lengths(
    opened: Mapping[str, OpenedModel], cache_gib: float, max_model_len: int | None
) -> tuple[dict[str, int], int]:
    """Tokens that each model's part of the KV cache holds, and the largest number of tokens of one sequence."""
    caches = {name: cache_tokens_in(model, cache_gib / len(opened)) for name, model in opened.items()}
    most = min(map(positions, opened.values()))
    # The scheduler keeps some pages free.
    held = min(
        [int(0.8 * caches[name]) for name, model in opened.items() if batching_obstacle(model) is None] or [most]
    )
    if max_model_len is None:
        max_model_len = min(most, max(held, 2))
    if not 2 <= max_model_len <= most:
        raise RecipeError(f"max_model_len={max_model_len} must be from 2 to the {most:,} positions of the model")
    if max_model_len > held:
        raise RecipeError(
            f"max_model_len={max_model_len:,} does not fit in the KV cache, which holds sequences of {held:,} tokens "
            f"for each of {as_count(len(opened), 'model')}; set --cache_gib to more than {cache_gib:g}"
        )
    return caches, max_model_len


@contextmanager
def _engines(
    opened: Mapping[str, OpenedModel], cache_tokens: Mapping[str, int], limits: "Limits"
) -> Iterator[dict[str, Engine]]:
    engines: dict[str, Engine] = {}
    try:
        for name, model in opened.items():
            engines[name] = start_engine(model, cache_tokens[name], limits.max_requests)
        yield engines
    finally:
        for engine in engines.values():
            engine.stop()


def _print_start(
    engines: Mapping[str, Engine], paths: Mapping[str, str], limits: "Limits", host: str, listener: socket.socket
) -> None:
    opened = {name: engine.opened for name, engine in engines.items()}
    for name, model in opened.items():
        reason = batching_obstacle(model)
        how = "requests batched together" if reason is None else f"one request at a time: {reason}"
        print(f"{name}: {paths.get(name, model.pretrained)}, {how}")
    print(
        f"up to {limits.max_model_len:,} tokens of a prompt and its answer, {limits.max_requests} answers at once or "
        f"waiting, {limits.max_body_bytes / 2**20:g} MiB of a body"
    )
    if host not in LOOPBACK and limits.api_key is None:
        print(f"{host} can be reached from other machines, and there is no key: set {API_KEY}, or --api_key_file")
    if "*" in limits.origins and limits.api_key is None:
        print(
            f"any web page that a browser here opens can use the server, and there is no key: set {API_KEY}, or "
            "--api_key_file"
        )
    print(f"for large loads: {vllm_command(opened, paths)}")
    print(f"listening on {address_of(host, listener)}/v1 (Ctrl-C stops)", flush=True)
