"""API key authentication. /health, the paths below it and the page's files need no key.

Plain ASGI, so that it runs before routing and adds no cost to streamed tokens. With several keys,
each key is a tenant of the fair scheduling policy and may have limits.
"""

from __future__ import annotations

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.api.errors import OctavoError, Overloaded, Unauthorized
from octavo.engine.protocol.requests import BACKGROUND_PRIORITY
from octavo.frontend.input_processor import RequestContext
from octavo.server.http.error_formats import get_error_format
from octavo.server.http.errors import error_response
from octavo.server.http.key_file import ApiKey
from octavo.server.settings import ServerSettings
from octavo.server.state.account import Account
from octavo.server.state.key_ring import KeyRing
from octavo.server.state.request_record import get_record

OPEN_PATHS = ("/health", "/health/live", "/health/ready", "/")
"""Paths without authentication; their content is public."""
OPEN_FOLDER = "/web/"
"""Path prefix of the page's files, also without authentication."""
METRICS_PATH = "/metrics"
KEY_NAME = "octavo_key_name"
"""Key of the ASGI scope with the name of the API key; the key itself is never kept."""
OPERATOR = "octavo_operator"
"""Key of the ASGI scope for whether the API key is an operator's."""

KEY_PROTOCOL = "openai-insecure-api-key."
"""Start of the WebSocket protocol that contains an API key, as OpenAI's clients send it."""
POLICY_VIOLATION = 1008
"""WebSocket close code; before the handshake, the client gets a 403."""

IS_BACKGROUND = "octavo_is_background"
"""Key of the ASGI scope of internal requests, which have the lowest priority."""


class ApiKeys:
    """ASGI middleware: responds 401 without a valid key, 429 beyond a key's limits."""

    def __init__(self, app: ASGIApp, ring: KeyRing, *, open_metrics: bool = False) -> None:
        self._app = app
        self._ring = ring
        self._open_paths = {*OPEN_PATHS, *([METRICS_PATH] if open_metrics else [])}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._is_open(scope):
            await self._app(scope, receive, send)
            return
        secret = _get_secret(Headers(scope=scope))
        key = self._ring.find(secret) if secret is not None else None
        if key is None and scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": POLICY_VIOLATION})
            return
        if key is None:
            error = Unauthorized(
                "a valid API key is required", hint="send the header Authorization: Bearer KEY"
            )
            await error_response(error, get_error_format(scope))(scope, receive, send)
            return
        await self._serve(key, scope, receive, send)

    async def _serve(self, key: ApiKey, scope: Scope, receive: Receive, send: Send) -> None:
        """Records the key of a request; requests for generation count against its limits."""
        account = self._ring.account(key.name)
        record = get_record(scope)
        record.owner, record.account = key.name, account
        scope[KEY_NAME], scope[OPERATOR] = key.name, self._ring.may_operate(key)
        if account is None or scope["type"] == "websocket":
            await self._app(scope, receive, send)
            return
        send = _with_limits(account, send)
        if scope["method"] == "POST":
            try:
                account.count_request()
            except Overloaded as error:
                await error_response(error, get_error_format(scope))(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        return path in self._open_paths or path.startswith(OPEN_FOLDER)


def get_owner(request: HTTPConnection) -> str:
    """Returns the name of the request's API key; "" if the server has no keys."""
    return str(request.scope.get(KEY_NAME, ""))


def require_operator(request: Request) -> None:
    """Raises a 403 unless the request comes from an operator.

    If no key is marked as operator, a single key is the operator's. Without any keys, every client
    is an operator, provided that only this machine can reach the server.
    """
    settings: ServerSettings = request.app.state.service.settings
    if request.scope.get(OPERATOR):
        return
    if not settings.has_keys and not settings.is_open_to_all:
        return
    raise HTTPException(
        403,
        "this route requires the operator key (hint: start the server with --operator-key and send"
        " it)",
    )


def get_tenant(request: HTTPConnection, user: str | None) -> str:
    """Returns the tenant: the API key's name if there are several keys, else `user`."""
    return request.scope.get(KEY_NAME) or user or ""


def is_operator(request: Request) -> bool:
    """Returns whether a request may see and change the requests of other keys."""
    try:
        require_operator(request)
    except (HTTPException, OctavoError):
        return False
    return True


def get_request_context(
    request: HTTPConnection, priority: int | None, user: str | None
) -> RequestContext:
    """Returns the request's context for the engine; batch requests have background priority."""
    if request.scope.get(IS_BACKGROUND):
        priority = BACKGROUND_PRIORITY
    return RequestContext(priority or 0, get_tenant(request, user), get_owner(request))


def _get_secret(headers: Headers) -> str | None:
    """Returns the API key: a bearer token, Anthropic's x-api-key header, or the WebSocket protocol
    in which browsers send it; None if the request has none.
    """
    scheme, _, secret = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return secret.strip()
    protocols = headers.get("sec-websocket-protocol", "").split(",")
    named = (name.strip().partition(KEY_PROTOCOL) for name in protocols)
    of_protocol = (key for before, protocol, key in named if protocol and not before)
    return headers.get("x-api-key") or next(of_protocol, None)


def _with_limits(account: Account, send: Send) -> Send:
    """Wraps `send` to add rate limit headers."""

    async def send_with_limits(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).update(account.headers())
        await send(message)

    return send_with_limits
