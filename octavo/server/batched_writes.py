"""Writes of one turn of the event loop, sent together at its end: one system call a connection.

With a step's tokens for many streams, a client on the same machine is woken once instead of by each
of them, and compute threads are preempted for less long. Knows bytes only.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class WriteBatch:
    """The connections of one event loop that have something to send."""

    def __init__(self) -> None:
        self._waiting: list[BatchedTransport] = []

    def add(self, transport: BatchedTransport) -> None:
        """Queues a connection's writes behind all callbacks that are ready to run."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._send)
        self._waiting.append(transport)

    def _send(self) -> None:
        waiting, self._waiting = self._waiting, []
        for transport in waiting:
            transport.send()


class BatchedTransport:
    """A transport whose writes wait for the batch; everything else is the transport's own."""

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
        """Sends the writes so far; drops them where the peer has gone, which uvloop refuses."""
        parts, self._parts = self._parts, []
        if parts and not self._transport.is_closing():
            self._transport.write(b"".join(parts))

    def close(self) -> None:
        self.send()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class BatchedHttp(HttpToolsProtocol):
    """The protocol of uvicorn on a batched transport; connections of a class share a batch."""

    batch: WriteBatch

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(BatchedTransport(transport, self.batch))  # type: ignore[arg-type]
