"""HEAD for every route that answers GET (RFC 9110, section 9.3.2).

ASGI middleware: the route sees a GET, and the HTTP protocol, which has seen a HEAD, sends the
answer without its body.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


class HeadAsGet:
    """Passes a HEAD request on as a GET."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)
