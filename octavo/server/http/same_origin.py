"""Rejects cross-origin requests from browsers when no API key protects the server.

Applies to WebSockets and to methods with side effects: CORS prevents another page from reading a
response, but not from sending a form or a simple request. Sources: Fetch Metadata (W3C), RFC 6454.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.server.http.auth import POLICY_VIOLATION
from octavo.server.http.error_formats import get_error_format
from octavo.server.http.errors import error_response

SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
OWN_SITES = ("same-origin", "none")
"""Values of Sec-Fetch-Site for the server's own page and for user navigation."""


LOCAL_ORIGIN = re.compile(r"https?://(?:localhost|127\.0\.0\.1|\[::1\])(?::\d{1,5})?")
"""Origins of pages served on the browser's own machine."""


class SameOrigin:
    """ASGI middleware: responds 403 to cross-origin requests unless the origin is allowed."""

    def __init__(
        self,
        app: ASGIApp,
        allowed: Sequence[str] = (),
        local: re.Pattern[str] | None = LOCAL_ORIGIN,
    ) -> None:
        """`allowed` lists the origins of --allow-origin; `local` matches origins that are always
        allowed.
        """
        self._app = app
        self._allowed = allowed
        self._local = local

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_socket = scope["type"] == "websocket"
        if not is_socket and (scope["type"] != "http" or scope["method"] in SAFE_METHODS):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if not _is_foreign(headers) or self._is_allowed(headers):
            await self._app(scope, receive, send)
            return
        if is_socket:
            await send({"type": "websocket.close", "code": POLICY_VIOLATION})
            return
        origin = headers.get("origin", "another origin")
        error = HTTPException(
            403,
            f"cross-origin request from a web page of {origin[:80]} (hint: use --allow-origin to"
            f" allow it)",
        )
        await error_response(error, get_error_format(scope))(scope, receive, send)

    def _is_allowed(self, headers: Headers) -> bool:
        origin = headers.get("origin", "")
        is_local = self._local is not None and self._local.fullmatch(origin) is not None
        return is_local or "*" in self._allowed or origin in self._allowed


def _is_foreign(headers: Headers) -> bool:
    """Returns whether the request's headers show that it comes from another site's page."""
    site = headers.get("sec-fetch-site")
    if site is not None:
        return site not in OWN_SITES
    origin = headers.get("origin")
    return origin is not None and origin.partition("://")[2] != headers.get("host")
