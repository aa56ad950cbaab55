"""Which requests are taken: those with the key; without a key, none that a page of another address may have made.

A page may send requests to a server on this machine, and by an address of its own that leads here (DNS rebinding) even
read the answers. Its browser gives the page's address in the header Origin, and the name that led here in Host.
"""

import hmac
from collections.abc import Collection
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from lit_ft.inference.openai.requests import RequestError, shown


def check_key(headers: Headers, api_key: str) -> None:
    """Refuse a request without the key.

    Raises:
        RequestError: it carries none, or another one.
    """
    given = headers.get("authorization", "")
    given = given[7:] if given[:7].lower() == "bearer " else given
    if not hmac.compare_digest(given.encode(), api_key.encode()):
        raise RequestError("the request carries no key, or another one than the server's", 401, "invalid_api_key")


def check_source(headers: Headers, origins: Collection[str], is_on_loopback: bool) -> None:
    """Refuse a request that a page of another address may have made, where no key tells who asks.

    Args:
        headers: headers of the request.
        origins: origins whose pages may use the server; ``*`` is all.
        is_on_loopback: whether only this machine reaches the server, so that its names are known.

    Raises:
        RequestError: the page, or the name by which it reached the server, is another one.
    """
    if "*" in origins:
        return
    host, origin = headers.get("host"), headers.get("origin")
    if is_on_loopback and host is not None and not _is_loopback(host) and host not in map(_netloc, origins):
        raise RequestError(
            f"the request is for the host {shown(host)}, and without a key the server is localhost alone; ask for "
            "that, or start the server with a key, or with --origin and the address of that host",
            403,
        )
    if origin is not None and origin not in origins and _netloc(origin) != host:
        raise RequestError(
            f"the request comes from a page of {shown(origin)}; start the server with --origin and that address", 403
        )


def check_json(headers: Headers) -> None:
    """Refuse a body that is not declared as JSON: a page may send text anywhere, without its browser asking first.

    Raises:
        RequestError: the body has another type, or none.
    """
    given = headers.get("content-type", "")
    if given.partition(";")[0].strip().lower() != "application/json":
        raise RequestError(f"Content-Type={shown(given)} must be application/json", 415)


def _netloc(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc or None
    except ValueError:
        return None


def _is_loopback(host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ip_address(name).is_loopback
    except ValueError:
        return False
