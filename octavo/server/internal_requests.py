"""Internal requests: calls of the server's own routes, without a socket or a key.

Responses equal those that a client would get. Internal requests have background priority.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from fastapi import APIRouter, FastAPI
from starlette.datastructures import Headers
from starlette.types import Message

from octavo.server.http.auth import IS_BACKGROUND, KEY_NAME
from octavo.server.http.errors import add_error_handlers
from octavo.server.state.request_record import SCOPE_KEY
from octavo.server.state.service import Service


@dataclass(frozen=True, slots=True)
class InternalResponse:
    status: int
    body: bytes
    retry_after_s: float = 0.0
    """From the Retry-After header; 0 without one."""


class InternalRequests:
    def __init__(
        self, service: Service, routers: Iterable[APIRouter], *, background_jobs: object
    ) -> None:
        """The arguments become the application state that the routes use."""
        self._service = service
        self._app = FastAPI(openapi_url=None)
        self._app.state.service = service
        self._app.state.background_jobs = background_jobs
        for router in routers:
            self._app.include_router(router)
        add_error_handlers(self._app)

    async def post(self, path: str, body: bytes, owner: str) -> InternalResponse:
        """Returns the response to an owner's request; cancellation aborts it."""
        record = self._service.background_record(owner)
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json")],
            "client": None,
            "server": None,
            IS_BACKGROUND: True,
            SCOPE_KEY: record,
            **({KEY_NAME: owner} if owner else {}),
        }
        exchange = _Connection(body)
        try:
            await self._app(scope, exchange.receive, exchange.send)
        finally:
            record.release()
        return InternalResponse(exchange.status, b"".join(exchange.parts), exchange.retry_after_s)


class _Connection:
    """ASGI receive and send of one request: provides the body once and collects the response."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self.status = 500
        self.retry_after_s = 0.0
        self.parts: list[bytes] = []

    async def receive(self) -> Message:
        if self._body is None:
            await asyncio.Future()  # this client never disconnects
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.retry_after_s = float(Headers(scope=message).get("retry-after", "0"))
        elif message["type"] == "http.response.body":
            self.parts.append(message.get("body", b""))
