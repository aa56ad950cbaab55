"""Access to the board: a token, in the address and then in a cookie, and requests of its own pages alone."""

import hmac
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qsl, urlencode, urlsplit

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

PARAMETER = "token"


class TokenGate:
    """ASGI application that lets requests with the token through to another one; the others get 401 or 403.

    Cookies are sent to all ports of a machine, and by pages of other ports too: the cookie's name has the board's port,
    and what comes from a page of another origin is refused.
    """

    def __init__(self, app: ASGIApp, token: str, port: int) -> None:
        """Set the token.

        Args:
            app: guarded application.
            token: token that requests carry.
            port: port that the board listens on.
        """
        self._app, self._token, self._cookie = app, token, f"lit_ft_board_{port}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or let it through."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        response: Response | None = None
        if not _is_own_origin(headers):
            response = PlainTextResponse("403: this request comes from a page of another address\n", 403)
        elif self._is_right(_query_token(scope)) and scope["type"] == "http" and scope["method"] == "GET":
            response = RedirectResponse(_without_token(scope), 303)
            response.set_cookie(self._cookie, self._token, httponly=True, samesite="strict", max_age=30 * 86_400)
        elif not self._is_right(_cookie(headers, self._cookie)) and not self._is_right(_bearer(headers)):
            response = PlainTextResponse("401: open the address with ?token=... that the board printed\n", 401)
        if response is None:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008})  # before it is accepted: HTTP 403
        else:
            await response(scope, receive, send)

    def _is_right(self, token: str) -> bool:
        return hmac.compare_digest(token.encode(), self._token.encode())


def _is_own_origin(headers: Headers) -> bool:
    origin = headers.get("origin")
    return origin is None or urlsplit(origin).netloc == headers.get("host")


def _query_token(scope: Scope) -> str:
    return dict(parse_qsl(scope["query_string"].decode("latin-1"))).get(PARAMETER, "")


def _without_token(scope: Scope) -> str:
    pairs = [pair for pair in parse_qsl(scope["query_string"].decode("latin-1")) if pair[0] != PARAMETER]
    path = "/" + scope["path"].lstrip("/")  # two slashes would name another host
    return path + (f"?{urlencode(pairs)}" if pairs else "")


def _cookie(headers: Headers, name: str) -> str:
    try:
        cookies = SimpleCookie(headers.get("cookie", ""))
    except CookieError:
        return ""
    return cookies[name].value if name in cookies else ""


def _bearer(headers: Headers) -> str:
    return headers.get("authorization", "").removeprefix("Bearer ")
