"""Sockets that commands listen on, opened before anything slow."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from lit_ft.errors import RecipeError

LOOPBACK = ("127.0.0.1", "::1", "localhost")


@contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """Open a socket that listens, so that a port in use is an error at once.

    Raises:
        RecipeError: the address cannot be listened on.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        raise RecipeError(
            f"{host}:{port} cannot be listened on ({error}); give another --port (0 is a free one) or --host"
        ) from error
    with listener:
        yield listener


def address_of(host: str, listener: socket.socket) -> str:
    """Address of a server, with ``http://`` and without a path."""
    return f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
