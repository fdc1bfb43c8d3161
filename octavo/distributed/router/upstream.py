"""HTTP/1.1 client of one server: a pool of connections with streamed responses.

An asyncio protocol that parses with httptools, like the server; docs/decisions/0037 compares it
with httpx2. At most `MAX_AHEAD_BYTES` are buffered; if the reader is slow, the connection is
paused.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httptools

from octavo.config.server_url import parse_server_url

MAX_AHEAD_BYTES = 256 << 10
"""Number of buffered bytes of a response at which its connection stops reading."""
MAX_IDLE_S = 2.0
"""Maximum age of a reused idle connection; uvicorn closes them after 5 s."""
MAX_IDLE_CONNECTIONS = 256
MAX_HEAD_BYTES = 64 << 10
"""Maximum size of a response's headers."""
MAX_OWN_BYTES = 64 << 20
"""Maximum size of a response that the router itself reads."""
STATUSES = range(200, 600)
"""Statuses of a final response."""

HeaderList = list[tuple[bytes, bytes]]


HINT = "name each server as `octavo serve` prints it; keys go with --server-api-key"


def normalize_server_url(text: str) -> str:
    """Returns the canonical URL of a server; raises ConfigError if it is invalid."""
    return str(parse_server_url(text, hint=HINT))


class UpstreamLost(Exception):
    """A server could not be reached, or the connection ended before the response was complete."""


@dataclass(frozen=True, slots=True)
class UpstreamRequest:
    """A request; `headers` contain neither Host nor Content-Length."""

    method: str
    target: str
    """Path and query."""
    headers: Sequence[tuple[bytes, bytes]] = ()
    body: bytes = b""

    def encode(self, host: bytes, prefix: str) -> bytes:
        """Returns the bytes of the request; `prefix` is prepended to the path."""
        length = b"Content-Length: %d\r\n" % len(self.body)
        has_body = bool(self.body) or self.method not in ("GET", "HEAD", "DELETE")
        lines = [
            f"{self.method} {prefix}{self.target} HTTP/1.1\r\n".encode("latin-1"),
            b"Host: %b\r\n" % host,
            *(b"%b: %b\r\n" % pair for pair in self.headers),
            length if has_body else b"",
            b"\r\n",
            self.body,
        ]
        return b"".join(lines)


class UpstreamConnection(asyncio.Protocol):
    """A connection with at most one request at a time.

    asyncio calls the protocol methods, httptools those that begin with `on_`.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._transport: Any = None
        self._answer: UpstreamResponse | None = None
        self._parser: Any = None
        self._head_bytes = 0
        self._is_interim = False
        """Whether the current message is an interim response, such as 100 Continue."""
        self.idle_since_s = 0.0
        """End of its last request, on the monotonic clock."""
        self.is_open = False

    def start(self, data: bytes) -> UpstreamResponse:
        """Sends a request; the connection must be idle."""
        self._parser = httptools.HttpResponseParser(self)
        self._answer = UpstreamResponse(self, self._loop)
        if not self.is_open:
            self._answer.fail(UpstreamLost("the server closed the connection"))
        else:
            self._transport.write(data)
        return self._answer

    def pause(self) -> None:
        if self.is_open:
            self._transport.pause_reading()

    def resume(self) -> None:
        if self.is_open:
            self._transport.resume_reading()

    def abort(self) -> None:
        """Closes the connection at once, which aborts the request on the server."""
        if self._transport is not None:
            self._transport.abort()
        self.is_open = False

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        if self._answer is None:
            self.abort()  # no request is pending
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(f"no HTTP: {error}")
            self.abort()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        self._fail(str(exc) if exc else "the server closed the connection")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > MAX_HEAD_BYTES:
            self._fail(f"its headers have more than {MAX_HEAD_BYTES:,} bytes")
            self.abort()
        if self._answer is not None:
            self._answer.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status, self._head_bytes = self._parser.get_status_code(), 0
        self._is_interim = 100 <= status < 200
        if self._answer is None:
            return
        if self._is_interim:
            self._answer.headers.clear()
        elif status in STATUSES:
            self._answer.begin(status)
        else:
            self._fail(f"no HTTP: status {status}")
            self.abort()

    def on_body(self, data: bytes) -> None:
        if self._answer is not None:
            self._answer.add(data)

    def on_message_complete(self) -> None:
        if self._is_interim:
            return
        answer, self._answer = self._answer, None
        if not self._parser.should_keep_alive():
            self.abort()
        self.idle_since_s = time.monotonic()
        if answer is not None:
            answer.end()

    def _fail(self, reason: str) -> None:
        answer, self._answer = self._answer, None
        if answer is not None:
            answer.fail(UpstreamLost(reason))


class UpstreamResponse:
    """Response to one request while it is received."""

    def __init__(self, connection: UpstreamConnection, loop: asyncio.AbstractEventLoop) -> None:
        self.status = 0
        """HTTP status; 0 before the head has arrived."""
        self.headers: HeaderList = []
        """Headers in order, names in lower case."""
        self.is_complete = False
        """Whether the response has arrived completely."""
        self.is_cancelled = False
        """Whether the router aborted the request."""
        self.connection = connection
        self._loop = loop
        self._parts: deque[bytes] = deque()
        self._num_bytes = 0
        self._error: UpstreamLost | None = None
        self._waiter: asyncio.Future[None] | None = None

    def header(self, name: bytes) -> bytes:
        """Returns a header's value; b"" if it is missing."""
        return next((value for known, value in self.headers if known == name), b"")

    async def read(self) -> bytes:
        """Waits for data and returns everything received since the last call; b"" at the end.
        Raises UpstreamLost if the connection was lost.
        """
        while not self._parts:
            if self.is_complete:
                return b""
            if self._error is not None:
                raise self._error
            await self._change()
        data = b"".join(self._parts) if len(self._parts) > 1 else self._parts[0]
        self._parts.clear()
        if self._num_bytes > MAX_AHEAD_BYTES:
            self.connection.resume()
        self._num_bytes = 0
        return data

    async def wait_for_body(self) -> None:
        """Waits for the first byte of the body, or for the end of the response."""
        while not (self._parts or self.is_complete):
            if self._error is not None:
                raise self._error
            await self._change()

    async def read_all(self) -> bytes:
        """Returns the rest of the body; raises UpstreamLost if it exceeds MAX_OWN_BYTES."""
        parts, num_bytes = [], 0
        while data := await self.read():
            parts.append(data)
            num_bytes += len(data)
            if num_bytes > MAX_OWN_BYTES:
                raise UpstreamLost(f"its response has more than {MAX_OWN_BYTES:,} bytes")
        return b"".join(parts)

    def cancel(self, reason: str = "given up") -> None:
        """Aborts an incomplete request, which also aborts its work on the server."""
        if not self.is_complete:
            self.is_cancelled = True
            self.fail(UpstreamLost(reason))
            self.connection.abort()

    # -- called by the connection ------------------------------------------------------------------

    def begin(self, status: int) -> None:
        self.status = status
        self._wake()

    def add(self, data: bytes) -> None:
        self._parts.append(data)
        before = self._num_bytes
        self._num_bytes += len(data)
        if before <= MAX_AHEAD_BYTES < self._num_bytes:
            self.connection.pause()
        self._wake()

    def end(self) -> None:
        self.is_complete = True
        self._wake()

    def fail(self, error: UpstreamLost) -> None:
        if self._error is None and not self.is_complete:
            self._error = error
        self._wake()

    async def _change(self) -> None:
        self._waiter = self._loop.create_future()
        await self._waiter

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class UpstreamClient:
    """Connections to one server."""

    def __init__(self, url: str, *, connect_timeout_s: float, api_key: str | None = None) -> None:
        address = parse_server_url(url, hint=HINT)
        self.url = str(address)
        self.host = address.host
        """Host name or address."""
        self._port = address.port
        self._tls = ssl.create_default_context() if address.is_tls else None
        self._authority = address.authority.encode()
        self._prefix = address.path
        self._timeout_s = connect_timeout_s
        self._api_key = api_key
        self._idle: list[UpstreamConnection] = []
        self._waiting: set[UpstreamResponse] = set()

    async def send(self, request: UpstreamRequest) -> UpstreamResponse:
        """Sends a request and returns its response after the head and the first byte of the body
        have arrived. Raises UpstreamLost. A stale connection is replaced first.
        """
        data = request.encode(self._authority, self._prefix)
        while (connection := self._take_idle()) is not None:
            answer = connection.start(data)
            try:
                return await self._start(connection, answer)
            except UpstreamLost:
                if answer.status or answer.is_cancelled:
                    raise  # the response had begun, or the connection was idle for too long
        connection = await self._connect()
        return await self._start(connection, connection.start(data))

    async def fetch(self, method: str, target: str, body: bytes = b"") -> tuple[int, bytes]:
        """Sends a request of the router itself; returns the status and the complete body."""
        headers = [(b"User-Agent", b"octavo")]
        if body:
            headers.append((b"Content-Type", b"application/json"))
        if self._api_key:
            headers.append((b"Authorization", b"Bearer " + self._api_key.encode()))
        answer = await self.send(UpstreamRequest(method, target, headers, body))
        try:
            body_bytes = await answer.read_all()
        finally:
            self.finish(answer)
        return answer.status, body_bytes

    def finish(self, answer: UpstreamResponse) -> None:
        """Releases the connection of a response that has been read or is no longer needed."""
        connection = answer.connection
        if not answer.is_complete:
            answer.cancel()
        elif connection.is_open and len(self._idle) < MAX_IDLE_CONNECTIONS:
            self._idle.append(connection)
        else:
            connection.abort()

    def abort_waiting(self, reason: str) -> None:
        """Aborts all requests whose responses have not begun."""
        for answer in list(self._waiting):
            answer.cancel(reason)

    def close(self) -> None:
        """Closes the idle connections."""
        for connection in self._idle:
            connection.abort()
        self._idle.clear()

    async def _start(
        self, connection: UpstreamConnection, answer: UpstreamResponse
    ) -> UpstreamResponse:
        self._waiting.add(answer)
        try:
            await answer.wait_for_body()
        except UpstreamLost:
            connection.abort()
            raise
        except BaseException:
            answer.cancel()
            raise
        finally:
            self._waiting.discard(answer)
        return answer

    def _take_idle(self) -> UpstreamConnection | None:
        oldest = time.monotonic() - MAX_IDLE_S
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and connection.idle_since_s > oldest:
                return connection
            connection.abort()
        return None

    async def _connect(self) -> UpstreamConnection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._timeout_s):
                _, connection = await loop.create_connection(
                    lambda: UpstreamConnection(loop), self.host, self._port, ssl=self._tls
                )
        except TimeoutError:
            raise UpstreamLost(f"no connection within {self._timeout_s:g} s") from None
        except OSError as error:
            raise UpstreamLost(error.strerror or str(error) or "no connection") from error
        return connection
