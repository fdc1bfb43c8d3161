"""Server-sent events: a response that streams a generator's events.

A disconnect closes the generator; a slow reader slows it down, since nothing is queued. Source of
the format: WHATWG HTML, section 9.2.
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

from octavo.api.errors import OctavoError
from octavo.server.http.connection import cancel_on_disconnect
from octavo.server.http.errors import error_body
from octavo.server.http.time_limit import DEADLINE, Deadline

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
PING_INTERVAL_S = 15.0
"""Seconds without an event after which a ping is sent. Many clients and proxies time out after some
minutes, and the prefill of a long prompt can take that long on a slow machine.
"""
NO_HEADERS: Mapping[str, str] = MappingProxyType({})

Events = AsyncGenerator[list[Any], None]
"""Stream of payload lists; the payloads of one list are sent together."""


class EventStream(Response):
    """A streaming response of server-sent events."""

    end = DONE
    """Sent after the last event."""
    ping = b": ping\n\n"
    """Comment that clients skip, sent as a ping; empty: no pings."""
    media_type = "text/event-stream"

    def __init__(self, events: Events, headers: Mapping[str, str] = NO_HEADERS) -> None:
        super().__init__(
            headers={**headers, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        )
        del self.headers["content-length"]
        self._events = events
        self._encoder = msgspec.json.Encoder()
        self._sent_at_s = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        try:
            with suppress(ClientDisconnect):
                await cancel_on_disconnect(
                    receive, self._write(send, scope.get(DEADLINE, Deadline()))
                )
        finally:
            await self._events.aclose()

    async def _write(self, send: Send, deadline: Deadline) -> None:
        """Sends all events; an error becomes an event, since the status has already been sent."""
        pings = asyncio.ensure_future(self._send_pings(send))
        try:
            async with asyncio.timeout_at(deadline.at_s) as limit:
                async for payloads in self._events:
                    await self._send_part(send, self.format_events(payloads))
        except Exception as error:
            reported: Exception = deadline.error if limit.expired() else error
            if reported is error and not isinstance(error, OctavoError):
                logger.exception("a stream failed")
            await self._send_part(send, self.format_events(self.failure(reported)))
        finally:
            pings.cancel()
        await send({"type": "http.response.body", "body": self.end, "more_body": False})

    async def _send_pings(self, send: Send) -> None:
        """Sends a ping after each `PING_INTERVAL_S` without an event, until cancelled."""
        loop = asyncio.get_running_loop()
        self._sent_at_s = loop.time()
        with suppress(OSError, ClientDisconnect):
            while self.ping:
                silence_left_s = self._sent_at_s + PING_INTERVAL_S - loop.time()
                if silence_left_s > 0:
                    await asyncio.sleep(silence_left_s)
                else:
                    await self._send_part(send, self.ping)

    async def _send_part(self, send: Send, body: bytes) -> None:
        self._sent_at_s = asyncio.get_running_loop().time()
        await send({"type": "http.response.body", "body": body, "more_body": True})

    def failure(self, error: Exception) -> list[Any]:
        """Returns the events that report an error."""
        return [error_body(error)]

    def format_events(self, payloads: Iterable[Any]) -> bytes:
        return b"".join([b"data: " + self.encode(payload) + b"\n\n" for payload in payloads])

    def encode(self, payload: Any) -> bytes:
        return self._encoder.encode(payload)


class NamedEventStream(EventStream):
    """A stream of events named by their `type`, without an end marker."""

    end = b""

    def format_events(self, payloads: Iterable[dict[str, Any]]) -> bytes:
        parts = [
            b"event: %b\ndata: %b\n\n" % (payload["type"].encode(), self.encode(payload))
            for payload in payloads
        ]
        return b"".join(parts)
