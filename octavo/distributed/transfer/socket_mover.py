"""Block transfers over plain TCP, directly from the sender's memory into the slots.

ZeroMQ would first copy received data into its own memory, which on a single machine takes longer
than the transfer. Reads are not encrypted, and authenticated only by a token: engines that share a
secret send blocks in messages instead.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from octavo.distributed.transfer.block_transport import RemoteBytes
from octavo.distributed.transfer.memory_server import (
    COUNT,
    MAX_RANGES,
    RANGE,
    MemoryServer,
    receive_into,
    set_timeout,
)

TIMEOUT_S = 5.0
"""Seconds without a received byte after which a read fails."""
MAX_CONNECTIONS = 64
"""Maximum number of open connections; beyond it, the oldest connection is closed."""

logger = logging.getLogger(__name__)


class SocketMover:
    """Implements `block_transport.BlockTransport`."""

    def __init__(self, host: str | None) -> None:
        """`host` is the address from which other engines read; None: this engine only reads."""
        self._server = None if host is None else MemoryServer(host)
        self._connections: dict[str, socket.socket] = {}
        """Connections to other engines, by their sessions."""

    @property
    def session(self) -> str:
        return "" if self._server is None else self._server.session

    def register(self, memory: NDArray[np.uint8]) -> None:
        if self._server is not None:
            self._server.register(memory)

    def read(self, session: str, ranges: Sequence[RemoteBytes]) -> Iterator[RemoteBytes]:
        is_whole = False
        try:
            connection = self._connection_to(session)
            for first in range(0, len(ranges), MAX_RANGES):
                some = ranges[first : first + MAX_RANGES]
                connection.sendall(_request(some))
                for one in some:
                    receive_into(connection, one.into)
                    yield one
            is_whole = True
        except (OSError, ValueError) as error:
            logger.info("KV blocks at %s could not be read: %s", session.partition("/")[0], error)
        finally:
            if not is_whole:
                self._forget(session)

    def _connection_to(self, session: str) -> socket.socket:
        """Returns the connection to an engine; raises ValueError if the session is invalid."""
        if session not in self._connections:
            address, _, token = session.partition("/")
            host, _, port = address.rpartition(":")
            secret = bytes.fromhex(token)
            connection = socket.create_connection((host, int(port)), timeout=TIMEOUT_S)
            try:
                connection.settimeout(None)
                set_timeout(connection, socket.SO_RCVTIMEO, TIMEOUT_S)
                set_timeout(connection, socket.SO_SNDTIMEO, TIMEOUT_S)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.sendall(secret)
            except OSError:
                connection.close()
                raise
            if len(self._connections) >= MAX_CONNECTIONS:
                self._forget(next(iter(self._connections)))
            self._connections[session] = connection
        return self._connections[session]

    def _forget(self, session: str) -> None:
        connection = self._connections.pop(session, None)
        if connection is not None:
            connection.close()

    def close(self) -> None:
        for session in list(self._connections):
            self._forget(session)
        if self._server is not None:
            self._server.close()


def _request(remote_ranges: Sequence[RemoteBytes]) -> bytes:
    ranges = (RANGE.pack(one.address, len(one.into)) for one in remote_ranges)
    return COUNT.pack(len(remote_ranges)) + b"".join(ranges)
