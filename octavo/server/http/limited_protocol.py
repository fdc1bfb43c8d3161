"""Limits on connections, below ASGI: how many, how late and how long a request's head, how slow a
reader.

The head (request line and headers) is timed per connection; the body where it is read (`body.py`).
Without limits a client could hold any number of connections open by sending nothing more, or by
never reading its answer, or fill the memory with a head that never ends.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from octavo.server.http.unchunked import unchunked
from octavo.server.settings import ServerSettings

MAX_HEAD_BYTES = 64 << 10
"""Longest head of a request; one that comes in a single piece may be as long as the piece."""
MAX_HEADERS = 256


def _refusal(status: str, kind: str, message: str, *headers: str) -> bytes:
    """Returns the whole answer that ends a connection below ASGI, in OpenAI's form."""
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


FULL = _refusal(
    "503 Service Unavailable",
    "ServiceUnavailableError",
    "too many connections are open (hint: try again in a second)",
    "Retry-After: 1",
)
MALFORMED = _refusal(
    "400 Bad Request", "BadRequestError", "the request is no valid HTTP/1.1 message"
)
HEAD_TOO_LONG = _refusal(
    "431 Request Header Fields Too Large",
    "RequestTooLargeError",
    f"the request's line and headers are too long: allowed are {MAX_HEAD_BYTES} bytes and"
    f" {MAX_HEADERS} headers",
)


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of the connections of one server."""

    head_timeout_s: float
    slow_client_timeout_s: float
    max_connections: int

    @staticmethod
    def of(settings: ServerSettings) -> ConnectionLimits:
        return ConnectionLimits(
            settings.request_timeout_s, settings.slow_client_timeout_s, settings.max_connections
        )


class LimitedHttpProtocol(HttpToolsProtocol):
    """The protocol of uvicorn, which closes connections that are too many, late or slow."""

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
        """Takes in what has arrived, unless the connection has been refused."""
        if self.transport.is_closing():
            return
        self._num_head_bytes += len(data)
        super().data_received(data)
        is_in_head = self._head_timer is not None
        if is_in_head and self._num_head_bytes > MAX_HEAD_BYTES:
            self._refuse(HEAD_TOO_LONG)

    def send_400_response(self, msg: str) -> None:
        """Refuses what the parser cannot read, or has stopped reading."""
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
            raise ValueError("too many headers")  # ends the parser

    def on_headers_complete(self) -> None:
        """Starts the request, where its head names one host: RFC 9112 (3.2) refuses others."""
        self._stop_head_timer()
        num_hosts = sum(name == b"host" for name, _ in self.headers)
        if num_hosts > 1 or (num_hosts == 0 and self.parser.get_http_version() != "1.0"):
            raise ValueError("not one Host")
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tells the request that is being answered: uvicorn tells the last one that was read."""
        self._stop_head_timer()
        self._stop_write_timer()
        self._stop_rest_timer()
        super().connection_lost(exc)
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.message_event.set()

    def _unsupported_upgrade_warning(self) -> None:
        """Says nothing: a request to change the protocol is answered in this one."""

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        if cycle.scope["http_version"] == "1.0":
            app = unchunked(cycle, app)
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        """Goes on to the next request; one that was answered before its body came has a time limit
        for the rest of it, too.
        """
        super().on_response_complete()
        if self.cycle.more_body and not self.transport.is_closing():
            self._rest_timer = self.loop.call_later(
                self.limits.head_timeout_s, self._close_unfinished
            )

    def pause_writing(self) -> None:
        """Stops the answer while its reader lags behind, and gives the reader a time limit."""
        super().pause_writing()
        self._stop_write_timer()
        self._write_timer = self.loop.call_later(
            self.limits.slow_client_timeout_s, self.transport.abort
        )

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_write_timer()

    def _start_head_timer(self) -> None:
        """Starts the timer where none runs: a new connection's first head has one limit in all."""
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
        """Ends the connection with an answer, unless it is ending."""
        if not self.transport.is_closing():
            self.transport.write(answer)
            self.transport.close()

    def _close_unfinished(self) -> None:
        self._head_timer = self._rest_timer = None
        if not self.transport.is_closing():
            self.transport.close()

    @classmethod
    def for_server(cls, settings: ServerSettings) -> type[LimitedHttpProtocol]:
        """Returns the protocol class of one server."""
        return type(cls.__name__, (cls,), {"limits": ConnectionLimits.of(settings)})
