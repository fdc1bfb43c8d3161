"""Limits on connections, below ASGI: their number, time and size of request heads, slow readers.

The head (request line and headers) is timed here, the body in `body.py`. Without limits a client
could hold connections open by sending nothing or never reading, or fill memory with an endless
head.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from octavo.server.settings import ServerSettings

MAX_HEAD_BYTES = 64 << 10
"""Maximum size of a request head that arrives in several pieces."""
MAX_HEADERS = 256


def _make_error_response(status: str, kind: str, message: str, *headers: str) -> bytes:
    """Builds the complete response that ends a connection below ASGI, in OpenAI's format."""
    code = int(status.partition(" ")[0])
    error = {"message": message, "type": kind, "param": None, "code": code}
    body = msgspec.json.encode({"error": error})
    lines = (
        f"HTTP/1.1 {status}",
        "Content-Type: application/json",
        "Connection: close",
        f"Content-Length: {len(body)}",
        *headers,
        "\r\n",
    )
    return "\r\n".join(lines).encode() + body


FULL = _make_error_response(
    "503 Service Unavailable",
    "ServiceUnavailableError",
    "too many open connections (hint: try again in a second)",
    "Retry-After: 1",
)
MALFORMED = _make_error_response("400 Bad Request", "BadRequestError", "invalid HTTP/1.1 request")
HEAD_TOO_LONG = _make_error_response(
    "431 Request Header Fields Too Large",
    "RequestTooLargeError",
    f"the request line and headers are too long: expected at most {MAX_HEAD_BYTES} bytes and"
    f" {MAX_HEADERS} headers",
)


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    head_timeout_s: float
    slow_client_timeout_s: float
    max_connections: int

    @staticmethod
    def of(settings: ServerSettings) -> ConnectionLimits:
        return ConnectionLimits(
            settings.request_timeout_s, settings.slow_client_timeout_s, settings.max_connections
        )


class LimitedHttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol with connection limits."""

    limits: ConnectionLimits

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._rest_timer: asyncio.TimerHandle | None = None
        self._num_head_bytes = 0
        self._answered: RequestResponseCycle | None = None
        if len(self.connections) > self.limits.max_connections:
            self._refuse(FULL)
            return
        self._start_head_timer()

    def data_received(self, data: bytes) -> None:
        """Handles received data, unless the connection has been refused."""
        if self.transport.is_closing():
            return
        self._num_head_bytes += len(data)
        super().data_received(data)
        is_in_head = self._head_timer is not None
        if is_in_head and self._num_head_bytes > MAX_HEAD_BYTES:
            self._refuse(HEAD_TOO_LONG)

    def send_400_response(self, msg: str) -> None:
        """Responds to requests that the parser rejects."""
        too_many = self.headers is not None and len(self.headers) > MAX_HEADERS
        self._refuse(HEAD_TOO_LONG if too_many else MALFORMED)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._stop_rest_timer()
        self._num_head_bytes = 0
        self._start_head_timer()

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS:
            raise ValueError("too many headers")  # stops the parser

    def on_headers_complete(self) -> None:
        """Starts the request if it names exactly one host: RFC 9112 (3.2) forbids others."""
        self._stop_head_timer()
        num_hosts = sum(name == b"host" for name, _ in self.headers)
        if num_hosts > 1 or (num_hosts == 0 and self.parser.get_http_version() != "1.0"):
            raise ValueError("expected exactly one Host header")
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Notifies the request in progress. uvicorn itself notifies only the request that was read
        last.
        """
        self._stop_head_timer()
        self._stop_write_timer()
        self._stop_rest_timer()
        super().connection_lost(exc)
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.message_event.set()

    def _unsupported_upgrade_warning(self) -> None:
        """Logs nothing: upgrade requests are served over HTTP/1.1."""

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        if cycle.scope["http_version"] == "1.0":
            app = unchunked(cycle, app)
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        """Continues with the next request. If the response was sent before the request body was
        completely read, a timeout applies to the rest of the body.
        """
        super().on_response_complete()
        if self.cycle.more_body and not self.transport.is_closing():
            self._rest_timer = self.loop.call_later(
                self.limits.head_timeout_s, self._close_unfinished
            )

    def pause_writing(self) -> None:
        """Pauses the response while its reader is slow, and starts a timeout."""
        super().pause_writing()
        self._stop_write_timer()
        self._write_timer = self.loop.call_later(
            self.limits.slow_client_timeout_s, self.transport.abort
        )

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_write_timer()

    def _start_head_timer(self) -> None:
        """Starts the timer unless it is already running: one timeout covers the entire first head
        of a connection.
        """
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(
                self.limits.head_timeout_s, self._close_unfinished
            )

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _stop_rest_timer(self) -> None:
        if self._rest_timer is not None:
            self._rest_timer.cancel()
            self._rest_timer = None

    def _refuse(self, answer: bytes) -> None:
        """Sends a response and closes the connection, unless it is closing."""
        if not self.transport.is_closing():
            self.transport.write(answer)
            self.transport.close()

    def _close_unfinished(self) -> None:
        self._head_timer = self._rest_timer = None
        if not self.transport.is_closing():
            self.transport.close()

    @classmethod
    def for_server(cls, settings: ServerSettings) -> type[LimitedHttpProtocol]:
        """Returns the protocol class for a server's limits."""
        return type(cls.__name__, (cls,), {"limits": ConnectionLimits.of(settings)})


def unchunked(cycle: RequestResponseCycle, app: ASGIApp) -> ASGIApp:
    """Wraps an app so that `cycle` sends its response unchunked and then closes the connection.

    Used for responses of unknown length to HTTP/1.0 clients, which do not support chunked encoding:
    closing the connection marks the end of the response.

    uvicorn itself sends chunks to all clients. Source: RFC 9112, sections 6.1 and 6.3.
    """

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        is_open_ended = False

        async def send_plainly(message: Message) -> None:
            nonlocal is_open_ended
            if message["type"] == "http.response.start":
                names = {name.lower() for name, _ in message.get("headers", ())}
                is_open_ended = b"content-length" not in names
                if is_open_ended:
                    cycle.chunked_encoding = False
            elif is_open_ended:
                # The cycle compares each part with the bytes that a Content-Length header would
                # still allow.
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_plainly)

    return answer
