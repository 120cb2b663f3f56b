"""Guards the studio: only the browser that opened the address with the token is let in, from the studio's own pages.

The token becomes a cookie that scripts cannot read and that other sites do not send. Cookies and SameSite ignore ports
(https://datatracker.ietf.org/doc/html/rfc6265#section-8.5), so a page of another local server would send it as well:
what has an effect also requires the studio's own `Origin` and a JSON body, which such a page cannot send without CORS,
and there is none.
"""

from __future__ import annotations

import secrets
from typing import Any
from urllib.parse import parse_qs

from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response

# Nothing from elsewhere, in no frame of others: https://www.w3.org/TR/CSP3/
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "media-src 'self'; frame-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
# Of a page that a command has written: it has a policy of its own, and here no origin, so no cookie and no request.
FRAMED = "sandbox allow-scripts; frame-ancestors 'self'"
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Guard:
    """Middleware (ASGI). token: of the address; port: names the cookie, so that several studios do not share one."""

    def __init__(self, app: Any, token: str, port: int):
        self._app, self._token, self._cookie = app, token, f"finetune-studio-{port}"

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # no web sockets here
            await send({"type": "websocket.close", "code": 1008})
            return

        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                given = {name.lower() for name, _ in message["headers"]}
                added = ((k.lower().encode(), v.encode()) for k, v in _HEADERS.items())
                message["headers"] = [*message["headers"], *(pair for pair in added if pair[0] not in given)]
            await send(message)

        answer = self._answer(Request(scope))
        await (answer or self._app)(scope, receive, with_headers)

    def _answer(self, request: Request) -> Response | None:
        """Returns the answer to a request that goes no further."""
        if given := parse_qs(request.url.query).get("token"):
            if request.method != "GET" or not secrets.compare_digest(given[0].encode(), self._token.encode()):
                return _refused("this token is not of this studio: open the address that it printed when it began")
            answer = RedirectResponse("/", 303)  # the token stays in no history
            if request.headers.get("sec-fetch-site") == "cross-site":
                # From the page of `--open`, a file: a redirect would go on as its request, and without the cookie.
                answer = HTMLResponse('<!doctype html><meta http-equiv="refresh" content="0; url=/">')
            answer.set_cookie(self._cookie, self._token, httponly=True, samesite="strict", path="/")
            return answer
        if not secrets.compare_digest(request.cookies.get(self._cookie, "").encode(), self._token.encode()):
            return _refused("open the whole address that the studio printed when it began, with its token")
        if request.method in ("GET", "HEAD"):
            return None
        if request.headers.get("origin") != f"http://{request.headers['host']}":
            return _refused("this request is not from a page of the studio")
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            return _refused("expected a JSON body, with the header Content-Type: application/json")
        return None


def _refused(message: str) -> Response:
    return PlainTextResponse(f"{message}\n", 403, {"Connection": "close"})
