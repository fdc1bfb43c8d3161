"""Refusal of what a browser sends for a page of another origin, where no key would stop it.

ASGI middleware for methods that change something. CORS keeps such a page from reading an answer; a
form or a plain fetch would still have its effect. Sources: Fetch Metadata (W3C), RFC 6454.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.server.http.error_forms import form_of
from octavo.server.http.errors import error_response

SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
OWN_SITES = ("same-origin", "none")
"""Values of Sec-Fetch-Site for the server's own page and for what the user typed."""


LOCAL_ORIGIN = re.compile(r"https?://(?:localhost|127\.0\.0\.1|\[::1\])(?::\d{1,5})?")
"""Origins of pages that a program on the browser's own machine serves."""


class SameOrigin:
    """Answers 403 to requests for pages whose origin is neither the server's nor allowed."""

    def __init__(
        self,
        app: ASGIApp,
        allowed: Sequence[str] = (),
        local: re.Pattern[str] | None = LOCAL_ORIGIN,
    ) -> None:
        """Takes the origins of --allow-origin, and the pattern of those that need no option."""
        self._app = app
        self._allowed = allowed
        self._local = local

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in SAFE_METHODS:
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if not _is_foreign(headers) or self._is_allowed(headers):
            await self._app(scope, receive, send)
            return
        origin = headers.get("origin", "another origin")
        error = HTTPException(
            403,
            f"this request comes from a web page of {origin[:80]} (hint: start the server with"
            " --allow-origin to let that page use it)",
        )
        await error_response(error, form_of(scope))(scope, receive, send)

    def _is_allowed(self, headers: Headers) -> bool:
        origin = headers.get("origin", "")
        is_local = self._local is not None and self._local.fullmatch(origin) is not None
        return is_local or "*" in self._allowed or origin in self._allowed


def _is_foreign(headers: Headers) -> bool:
    """Returns whether a browser says, or shows by its Origin, that another site's page asks."""
    site = headers.get("sec-fetch-site")
    if site is not None:
        return site not in OWN_SITES
    origin = headers.get("origin")
    return origin is not None and origin.partition("://")[2] != headers.get("host")
