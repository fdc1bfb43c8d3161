"""Lets other engines read registered memory over plain TCP connections.

A reader sends a token that it received in a message, and then any number of requests for address
ranges. The server sends the raw bytes in the requested order. A range outside registered memory
ends the connection. One thread accepts connections; each connection has its own thread. Nothing is
encrypted: engines that share a secret send blocks in messages instead.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import socket
import struct
import threading
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

TOKEN_BYTES = 16
COUNT = struct.Struct("<I")
"""Format of the number of ranges, which precedes the ranges."""
RANGE = struct.Struct("<QQ")
"""Format of a range: an address and a number of bytes."""
MAX_RANGES = 4096
"""Largest number of ranges per request."""
MAX_READERS = 64
"""Largest number of connections; further ones are closed."""
SEND_TIMEOUT_S = 5.0
"""Seconds after which a reader is disconnected that reads nothing or sends no token."""
RETRY_S = 0.1
"""Seconds until accepting is retried after a failure."""
CLOSE_S = 1.0
"""Timeout for the thread's end, in seconds."""

logger = logging.getLogger(__name__)


class MemoryServer:
    """A listening socket, and the memory that readers may read."""

    def __init__(self, host: str) -> None:
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._memories: list[NDArray[np.uint8]] = []
        self._lock = threading.Lock()
        """Lock for the connections."""
        self._readers: set[socket.socket] = set()
        self._is_closed = False
        self._listener = socket.create_server((host, 0))
        port = self._listener.getsockname()[1]
        self.session = f"{host}:{port}/{self._token.hex()}"
        """Address and token for readers."""
        self._thread = threading.Thread(target=self._accept, name="octavo-kv-lend", daemon=True)
        self._thread.start()

    def register(self, memory: NDArray[np.uint8]) -> None:
        """Registers readable memory, before the first reader connects."""
        self._memories.append(memory)

    def close(self) -> None:
        """Ends all connections. Memory is referenced until the last thread has ended."""
        with self._lock:
            self._is_closed = True
            sockets = [self._listener, *self._readers]
        for one in sockets:
            leave(one)
        self._thread.join(CLOSE_S)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._is_closed:
                    return
                time.sleep(RETRY_S)  # no free descriptor, or the reader has left
                continue
            with self._lock:
                is_full = self._is_closed or len(self._readers) >= MAX_READERS
                if not is_full:
                    self._readers.add(connection)
            if is_full:
                connection.close()
            else:
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            set_timeout(connection, socket.SO_SNDTIMEO, SEND_TIMEOUT_S)
            set_timeout(connection, socket.SO_RCVTIMEO, SEND_TIMEOUT_S)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if not hmac.compare_digest(receive(connection, TOKEN_BYTES), self._token):
                return
            set_timeout(connection, socket.SO_RCVTIMEO, 0.0)  # the next request may be hours away
            while (memories := self._next_request(connection)) is not None:
                for memory in memories:
                    connection.sendall(memory.data)
        except OSError as error:
            logger.debug("a reader of KV blocks is gone: %s", error)
        finally:
            with self._lock:
                self._readers.discard(connection)
            connection.close()

    def _next_request(self, connection: socket.socket) -> Sequence[NDArray[np.uint8]] | None:
        """Waits for a request and returns its memory; None if it is not allowed."""
        (count,) = COUNT.unpack(receive(connection, COUNT.size))
        if count > MAX_RANGES:
            return None
        ranges = RANGE.iter_unpack(receive(connection, count * RANGE.size))
        memories = [self._memory_at(address, num_bytes) for address, num_bytes in ranges]
        readable = [memory for memory in memories if memory is not None]
        return readable if len(readable) == count else None

    def _memory_at(self, address: int, num_bytes: int) -> NDArray[np.uint8] | None:
        """Returns a range of registered memory; None if it is outside."""
        for memory in self._memories:
            first = address - memory.ctypes.data
            if 0 <= first <= len(memory) - num_bytes:
                return memory[first : first + num_bytes]
        return None


def set_timeout(connection: socket.socket, which: int, seconds: float) -> None:
    """Sets the kernel's timeout for receiving or sending; 0: none.

    Python's own timeouts poll the socket before each call, and do not wait for whole buffers.
    """
    whole = int(seconds)
    timeval = struct.pack("@ll", whole, int((seconds - whole) * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, which, timeval)


def receive(connection: socket.socket, num_bytes: int) -> bytes:
    """Receives a number of bytes; OSError if they do not arrive."""
    data = np.empty(num_bytes, np.uint8)
    receive_into(connection, data)
    return data.tobytes()


def receive_into(connection: socket.socket, into: NDArray[np.uint8]) -> None:
    """Fills memory with received bytes; OSError if they do not arrive."""
    done = 0
    while done < len(into):
        count = connection.recv_into(into[done:].data, 0, socket.MSG_WAITALL)
        if count == 0:
            raise ConnectionResetError("the connection has ended")
        done += count


def leave(connection: socket.socket) -> None:
    """Closes a connection, which unblocks the thread that waits for it."""
    with contextlib.suppress(OSError):  # the other side may have ended it
        connection.shutdown(socket.SHUT_RDWR)
