"""A model behind ``lit_ft serve``'s application in a thread, for tests."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from lit_ft.inference.continuous_batching import start_engine
from lit_ft.inference.openai.application import GracefulServer, Limits, application
from lit_ft.inference.opening import OpenedModel


@contextmanager
def in_thread(server: uvicorn.Server) -> Iterator[str]:
    """Address of a server that runs in a thread, on a port of its own."""
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)


@contextmanager
def serving(opened: OpenedModel, name: str = "run") -> Iterator[str]:
    """Address of a server in a thread, whose key is ``secret``."""
    engines = {name: start_engine(opened, 8_000, 8)}
    app = application(engines, Limits(max_model_len=512, api_key="secret"), {name: name})
    try:
        with in_thread(GracefulServer(app, engines.values(), stop_seconds=0.5)) as address:
            yield address
    finally:
        engines[name].stop()
