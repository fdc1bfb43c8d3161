"""API keys: every route but /health and the page's own files needs one when the server has any.

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

OPEN_PATHS = ("/health", "/")
"""Paths that need no key: what is served there is the same for everyone."""
OPEN_FOLDER = "/web/"
"""Beginning of the paths of the page's files, which need none either."""
KEY_NAME = "octavo_key_name"
"""Key of the ASGI scope whose value names the key that was sent, by its index ("key-1"); the key
itself is never kept.
"""


class ApiKeys:
    """ASGI middleware that answers 401 to requests without a valid key."""

    def __init__(self, app: ASGIApp, keys: Iterable[str]) -> None:
        self._app = app
        self._digests = [_digest(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _is_open(scope["path"]):
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
        """Returns the number of the key sent, from 1, or None; always compares all keys."""
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
    """Returns the tenant of a request: its key where the server has several, else its `user`."""
    return request.scope.get(KEY_NAME) or user or ""


def owner_of(request: Request) -> str:
    """Returns the name of the key that makes a request; "" where there is no more than one."""
    return str(request.scope.get(KEY_NAME, ""))


def require_operator(request: Request) -> None:
    """Raises 403 where the server has several keys, and the request's is not the operator's."""
    if request.scope.get(KEY_NAME):
        raise HTTPException(403, "the operator's key is needed")


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


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
