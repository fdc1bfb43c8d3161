"""Lets other engines read registered memory over plain TCP connections.

A reader shows a token that it was told in a message, and then asks for ranges of addresses, as
often as it likes; the bytes follow as they are, in the order asked for. Ranges outside of the
registered memory end the connection. One thread accepts, and each connection has one of its own.
Nothing is encrypted: engines that share a secret send blocks in messages instead.
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
"""Number of ranges, before them."""
RANGE = struct.Struct("<QQ")
"""An address and a number of bytes."""
MAX_RANGES = 4096
"""Most ranges that are asked for at once."""
MAX_READERS = 64
"""Most connections at once; further ones are closed."""
SEND_TIMEOUT_S = 5.0
"""Seconds after which a reader is left that takes no bytes, or shows no token."""
RETRY_S = 0.1
"""Seconds until readers are accepted again after that has failed."""
CLOSE_S = 1.0
"""Seconds in which the thread must end."""

logger = logging.getLogger(__name__)


class MemoryServer:
    """A listening socket, and the memory that may be read through it."""

    def __init__(self, host: str) -> None:
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._memories: list[NDArray[np.uint8]] = []
        self._lock = threading.Lock()
        """Guards the connections."""
        self._readers: set[socket.socket] = set()
        self._is_closed = False
        self._listener = socket.create_server((host, 0))
        port = self._listener.getsockname()[1]
        self.session = f"{host}:{port}/{self._token.hex()}"
        """Address and token, by which engines that are told them read."""
        self._thread = threading.Thread(target=self._accept, name="octavo-kv-lend", daemon=True)
        self._thread.start()

    def register(self, memory: NDArray[np.uint8]) -> None:
        """Makes memory readable; before the first reader comes."""
        self._memories.append(memory)

    def close(self) -> None:
        """Ends all connections. Memory lives on until the last thread has ended."""
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
                time.sleep(RETRY_S)  # no file is free, or the reader has gone already
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
            while (wanted := self._next_request(connection)) is not None:
                for memory in wanted:
                    connection.sendall(memory.data)
        except OSError as error:
            logger.debug("a reader of KV blocks has gone: %s", error)
        finally:
            with self._lock:
                self._readers.discard(connection)
            connection.close()

    def _next_request(self, connection: socket.socket) -> Sequence[NDArray[np.uint8]] | None:
        """Waits for a request and returns the memory that it asks for; None if it may not."""
        (count,) = COUNT.unpack(receive(connection, COUNT.size))
        if count > MAX_RANGES:
            return None
        ranges = RANGE.iter_unpack(receive(connection, count * RANGE.size))
        found = [self._memory_at(address, num_bytes) for address, num_bytes in ranges]
        wanted = [memory for memory in found if memory is not None]
        return wanted if len(wanted) == count else None

    def _memory_at(self, address: int, num_bytes: int) -> NDArray[np.uint8] | None:
        """Returns a range of the registered memory; None if it does not lie within it."""
        for memory in self._memories:
            first = address - memory.ctypes.data
            if 0 <= first <= len(memory) - num_bytes:
                return memory[first : first + num_bytes]
        return None


def set_timeout(connection: socket.socket, which: int, seconds: float) -> None:
    """Bounds how long the kernel waits for bytes, or for room for them; 0: for ever.

    Python's own timeouts look at the socket before each call, and do not wait for whole buffers.
    """
    whole = int(seconds)
    timeval = struct.pack("@ll", whole, int((seconds - whole) * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, which, timeval)


def receive(connection: socket.socket, num_bytes: int) -> bytes:
    """Receives a number of bytes; OSError if they do not come."""
    data = np.empty(num_bytes, np.uint8)
    receive_into(connection, data)
    return data.tobytes()


def receive_into(connection: socket.socket, into: NDArray[np.uint8]) -> None:
    """Fills memory with the bytes that come next; OSError if they do not come."""
    done = 0
    while done < len(into):
        count = connection.recv_into(into[done:].data, 0, socket.MSG_WAITALL)
        if count == 0:
            raise ConnectionResetError("the connection has ended")
        done += count


def leave(connection: socket.socket) -> None:
    """Ends a connection, so that the thread that waits for it continues."""
    with contextlib.suppress(OSError):  # the other side may have ended it
        connection.shutdown(socket.SHUT_RDWR)
