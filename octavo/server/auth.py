"""API keys: every route needs one when the server has any, but for /health, those under it, and the
page's own files.

Plain ASGI, so that it stands before routing and costs nothing per streamed token. Keys are compared
by digest, in constant time. Each of several keys is a tenant of its own under the fair policy.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.engine.front.input_processor import Origin
from octavo.errors import OctavoError, Unauthorized
from octavo.server.errors import error_response
from octavo.server.settings import ServerSettings

OPEN_PATHS = ("/health", "/health/live", "/health/ready", "/")
"""Paths that need no key: what is served there is the same for everyone."""
OPEN_FOLDER = "/web/"
"""Beginning of the paths of the page's files, which need none either."""
KEY_NAME = "octavo_key_name"
"""Key of the ASGI scope whose value names the key that was sent, by its index ("key-1"); the key
itself is never kept.
"""
OPERATOR = "octavo_operator"
"""Key of the ASGI scope whose value says whether the operator's key was sent."""


class ApiKeys:
    """ASGI middleware that answers 401 to requests without a valid key."""

    def __init__(self, app: ASGIApp, keys: Iterable[str], operator_key: str | None = None) -> None:
        self._app = app
        self._digests = [_digest(key) for key in keys]
        self._operator = None if operator_key is None else _digest(operator_key)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _is_open(scope["path"]):
            await self._app(scope, receive, send)
            return
        header = Headers(scope=scope).get("authorization")
        number = self._number(header)
        if self._is_operators(header):
            await self._app({**scope, KEY_NAME: "operator", OPERATOR: True}, receive, send)
            return
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

    def _is_operators(self, header: str | None) -> bool:
        key = _key_of(header)
        return (
            key is not None
            and self._operator is not None
            and hmac.compare_digest(_digest(key), self._operator)
        )

    def _number(self, header: str | None) -> int | None:
        """Returns the number of the key sent, from 1, or None; always compares all keys."""
        key = _key_of(header)
        if key is None:
            return None
        digest = _digest(key)
        found = [
            number
            for number, known in enumerate(self._digests, 1)
            if hmac.compare_digest(digest, known)
        ]
        return found[0] if found else None


def owner_of(request: Request) -> str:
    """Returns the name of who sent a request: that of its key, "" where the server has none."""
    return str(request.scope.get(KEY_NAME, ""))


def require_operator(request: Request) -> None:
    """Raises 403 unless the operator sent a request.

    Without an operator's key the only key is the operator's; without any keys, everyone is, where
    only this machine can reach the server.
    """
    settings: ServerSettings = request.app.state.service.settings
    if request.scope.get(OPERATOR):
        return
    has_several = settings.operator_key is not None or len(settings.api_key) > 1
    if not has_several and not settings.is_open_to_all:
        return
    raise HTTPException(
        403, "only the operator may do this (hint: start the server with --operator-key, send it)"
    )


def tenant_of(request: Request, user: str | None) -> str:
    """Returns the tenant of a request: its key where the server has several, else its `user`."""
    return request.scope.get(KEY_NAME) or user or ""


def is_operator(request: Request) -> bool:
    """Returns whether a request may see and change what others' keys have made."""
    try:
        require_operator(request)
    except (HTTPException, OctavoError):
        return False
    return True


def origin_of(request: Request, priority: int | None, user: str | None) -> Origin:
    """Returns where a request comes from, as the engine is told."""
    return Origin(priority or 0, tenant_of(request, user), owner_of(request))


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith(OPEN_FOLDER)


def _key_of(header: str | None) -> str | None:
    """Returns the bearer token of an Authorization header."""
    scheme, _, key = (header or "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
