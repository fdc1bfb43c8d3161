"""API keys: everything but /health asks for one when the server has any.

Plain ASGI, so that it stands before routing and costs nothing per streamed token. Keys are compared by digest, in constant time.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.errors import Unauthorized
from octavo.server.errors import error_response

OPEN_PATHS = ("/health",)


class ApiKeys:
    """Middleware."""

    def __init__(self, app: ASGIApp, keys: Iterable[str]) -> None:
        self._app = app
        self._digests = [_digest(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._is_allowed(Headers(scope=scope).get("authorization")):
            await self._app(scope, receive, send)
            return
        error = Unauthorized("a valid API key is needed", hint="send the header Authorization: Bearer KEY")
        await error_response(error)(scope, receive, send)

    def _is_allowed(self, header: str | None) -> bool:
        scheme, _, key = (header or "").partition(" ")
        if scheme.lower() != "bearer":
            return False
        digest = _digest(key.strip())
        return any([hmac.compare_digest(digest, known) for known in self._digests])  # noqa: C419  every key is compared


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
