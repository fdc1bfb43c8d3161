"""Server-sent events: a response over a generator that ends with [DONE], or as a subclass says.

A client that disconnects ends the generator. A slow reader slows the generator: nothing is queued
here. Source of the format: WHATWG HTML, section 9.2.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.errors import OctavoError
from octavo.server.connection import unless_gone
from octavo.server.errors import error_body
from octavo.server.time_limit import DEADLINE, Deadline

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
NO_HEADERS: Mapping[str, str] = MappingProxyType({})

Events = AsyncGenerator[list[Any], None]
"""Stream of payload lists; the payloads of one list are sent together."""


class EventStream(Response):
    """A streamed response of server-sent events."""

    end = DONE
    """Bytes that follow the last event."""
    media_type = "text/event-stream"

    def __init__(self, events: Events, headers: Mapping[str, str] = NO_HEADERS) -> None:
        super().__init__(
            headers={**headers, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        )
        del self.headers["content-length"]
        self._events = events
        self._encoder = msgspec.json.Encoder()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        try:
            with suppress(ClientDisconnect):
                await unless_gone(receive, self._write(send, scope.get(DEADLINE, Deadline())))
        finally:
            await self._events.aclose()

    async def _write(self, send: Send, deadline: Deadline) -> None:
        """Sends all events; an error becomes an event of its own, as the status has been sent."""
        try:
            async with asyncio.timeout_at(deadline.at_s) as limit:
                async for payloads in self._events:
                    await _send_part(send, self.format_events(payloads))
        except Exception as error:
            told: Exception = deadline.error if limit.expired() else error
            if told is error and not isinstance(error, OctavoError):
                logger.exception("a stream failed")
            await _send_part(send, self.format_events(self.failure(told)))
        await send({"type": "http.response.body", "body": self.end, "more_body": False})

    def failure(self, error: Exception) -> list[Any]:
        """Returns the events that tell of an error."""
        return [error_body(error)]

    def format_events(self, payloads: Iterable[Any]) -> bytes:
        """Returns the bytes of some events."""
        return b"".join([b"data: " + self.encode(payload) + b"\n\n" for payload in payloads])

    def encode(self, payload: Any) -> bytes:
        return self._encoder.encode(payload)


class NamedEventStream(EventStream):
    """A stream of events that bear their `type` as a name, and end without a mark."""

    end = b""

    def format_events(self, payloads: Iterable[dict[str, Any]]) -> bytes:
        parts = [
            b"event: %b\ndata: %b\n\n" % (payload["type"].encode(), self.encode(payload))
            for payload in payloads
        ]
        return b"".join(parts)


async def _send_part(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})
