"""What is written to connections in one turn of the event loop, sent at its end: one system call
for each connection, one after another.

With a step's tokens for many streams, a client beside the server is woken once and not by each of
them, and the threads that compute are put aside for less long. Knows bytes only.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class WriteBatch:
    """Connections of one event loop that have something to send."""

    def __init__(self) -> None:
        self._waiting: list[BatchedTransport] = []

    def add(self, transport: BatchedTransport) -> None:
        """Whatever is ready to run goes first."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._send)
        self._waiting.append(transport)

    def _send(self) -> None:
        waiting, self._waiting = self._waiting, []
        for transport in waiting:
            transport.send()


class BatchedTransport:
    """A transport whose writes wait for the batch; in everything else the transport itself."""

    __slots__ = ("_batch", "_parts", "_transport")

    def __init__(self, transport: asyncio.Transport, batch: WriteBatch) -> None:
        self._transport = transport
        self._batch = batch
        self._parts: list[bytes] = []

    def write(self, data: bytes) -> None:
        if not self._parts:
            self._batch.add(self)
        self._parts.append(data)

    def send(self) -> None:
        """What has been written until now; nothing where all is sent, or where the other side has
        gone meanwhile: uvloop refuses that.
        """
        parts, self._parts = self._parts, []
        if parts and not self._transport.is_closing():
            self._transport.write(b"".join(parts))

    def close(self) -> None:
        self.send()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class BatchedHttp(HttpToolsProtocol):
    """uvicorn's protocol on such a transport; all of one class share a batch."""

    batch: WriteBatch

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(BatchedTransport(transport, self.batch))  # type: ignore[arg-type]

    @classmethod
    def of(cls, batch: WriteBatch) -> type[BatchedHttp]:
        """For one server."""
        return type(cls.__name__, (cls,), {"batch": batch})
