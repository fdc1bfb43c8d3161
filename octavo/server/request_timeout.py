"""A limit on how long a client may take to send a request, so that half-sent ones end.

The head (request line and headers) is timed per connection, below ASGI; the body where it is read
(`body.py`). Without it a client could hold any number of connections open by sending nothing more.
"""

from __future__ import annotations

import asyncio

from octavo.server.batched_writes import BatchedHttp, WriteBatch


class TimedHttp(BatchedHttp):
    """The protocol of uvicorn, which closes connections whose request head is late."""

    head_timeout_s: float

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_timer: asyncio.TimerHandle | None = None
        self._start_head_timer()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._start_head_timer()

    def on_headers_complete(self) -> None:
        self._stop_head_timer()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        super().connection_lost(exc)

    def _start_head_timer(self) -> None:
        """Starts the timer where none runs: a new connection's first head has one limit in all."""
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_timeout_s, self._close_unfinished)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _close_unfinished(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self.transport.close()

    @classmethod
    def for_server(cls, batch: WriteBatch, head_timeout_s: float) -> type[TimedHttp]:
        """Returns the protocol class of one server, whose connections share a batch of writes."""
        return type(cls.__name__, (cls,), {"batch": batch, "head_timeout_s": head_timeout_s})
