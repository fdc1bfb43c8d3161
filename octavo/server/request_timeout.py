"""Limits on connections, below ASGI: how many, how late a request's head, how slow a reader.

The head (request line and headers) is timed per connection; the body where it is read (`body.py`).
Without limits a client could hold any number of connections open by sending nothing more, or by
never reading its answer.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from octavo.server.batched_writes import BatchedHttp, WriteBatch
from octavo.server.settings import ServerSettings

FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
    b"Connection: close\r\nContent-Length: %d\r\n\r\n%s"
)
FULL_BODY = (
    b'{"error":{"message":"too many connections are open (hint: try again in a second)",'
    b'"type":"ServiceUnavailableError","param":null,"code":503}}'
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


class TimedHttp(BatchedHttp):
    """The protocol of uvicorn, which closes connections that are too many, late or slow."""

    limits: ConnectionLimits

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        if len(self.connections) > self.limits.max_connections:
            transport.write(FULL % (len(FULL_BODY), FULL_BODY))
            transport.close()
            return
        self._start_head_timer()

    def data_received(self, data: bytes) -> None:
        if not self.transport.is_closing():  # what a refused connection still sends is not read
            super().data_received(data)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._start_head_timer()

    def on_headers_complete(self) -> None:
        self._stop_head_timer()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._stop_write_timer()
        super().connection_lost(exc)

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

    def _close_unfinished(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self.transport.close()

    @classmethod
    def for_server(cls, batch: WriteBatch, limits: ConnectionLimits) -> type[TimedHttp]:
        """Returns the protocol class of one server, whose connections share a batch of writes."""
        return type(cls.__name__, (cls,), {"batch": batch, "limits": limits})
