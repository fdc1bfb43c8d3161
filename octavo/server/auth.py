"""API keys: everything but /health asks for one when the server has any.

Plain ASGI, so that it stands before routing and costs nothing per streamed token. Keys are compared
by digest, in constant time. Where there are several, each is a tenant of its own to whoever shares
the engine among tenants.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.errors import Unauthorized
from octavo.server.errors import error_response

OPEN_PATHS = ("/health",)
KEY_NAME = "octavo_key_name"
"""In the ASGI scope: which of several keys was sent, by its place among them ("key-1"); never the
key itself.
"""


class ApiKeys:
    """Middleware."""

    def __init__(self, app: ASGIApp, keys: Iterable[str]) -> None:
        self._app = app
        self._digests = [_digest(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        number = self._number(Headers(scope=scope).get("authorization"))
        if number is not None:
            await self._app(
                {**scope, KEY_NAME: f"key-{number}"} if len(self._digests) > 1 else scope,
                receive,
                send,
            )
            return
        error = Unauthorized(
            "a valid API key is needed", hint="send the header Authorization: Bearer KEY"
        )
        await error_response(error)(scope, receive, send)

    def _number(self, header: str | None) -> int | None:
        """Which key it is, counted from 1; None for none of them. Every key is compared."""
        scheme, _, key = (header or "").partition(" ")
        if scheme.lower() != "bearer":
            return None
        digest = _digest(key.strip())
        found = [
            number
            for number, known in enumerate(self._digests, 1)
            if hmac.compare_digest(digest, known)
        ]
        return found[0] if found else None


def tenant_of(request: Request, user: str | None) -> str:
    """Whom a request is counted to: its key where the server has several, else the `user` that it
    names.
    """
    return request.scope.get(KEY_NAME) or user or ""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
