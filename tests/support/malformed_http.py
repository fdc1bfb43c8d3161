"""Seeded malformed HTTP/1.1 messages as raw bytes, and how a server ends each connection.

A message is sent in parts with pauses between them. Knows sockets and status lines, no route's
meaning. Source of what is malformed: RFC 9112.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field

CLOSE_S = 20
"""Seconds in which a server is to answer and close."""
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
BODY = b'{"prompt": "Hello", "max_tokens": 1}'
WHOLE = POST + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
GET = b"GET /version HTTP/1.1\r\nHost: x\r\n"
LINES = (
    b"GET\r\n\r\n",
    b"GARBAGE\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET / HTTQ/1.1\r\n\r\n",
    b" GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GE\x00T / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /\x00 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET ?nothing HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET http://[::1 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"CONNECT / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"SSH-2.0-OpenSSH_9.9\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(512),
    b"\x00" * 4096,
    b"\r\n" * 50_000,
    b"DELETE /%00%ff/../.. HTTP/1.1\r\nHost: x\r\n\r\n",
)
HEADERS = (
    b"No colon\r\n",
    b"Space : before\r\n",
    b": no name\r\n",
    b"Folded: a\r\n b\r\nx\r\n",
    b"N\x00ul: x\r\n",
    b"Value: \x00\r\n",
    b"Value: a\rb: c\r\n",
    b"\xff: x\r\n",
    b"Host : x\r\n",
)
LENGTHS = (
    b"Content-Length: 5\r\nContent-Length: 6\r\n",
    b"Content-Length: 36\r\nTransfer-Encoding: chunked\r\n",
    b"Content-Length: -1\r\n",
    b"Content-Length: 1e3\r\n",
    b"Content-Length: 0x24\r\n",
    b"Content-Length: +36\r\n",
    b"Content-Length: 36, 36\r\n",
    b"Content-Length: 99999999999999999999999\r\n",
    b"Content-Length: \r\n",
    b"Transfer-Encoding: chunked, identity\r\n",
    b"Transfer-Encoding: xchunked\r\n",
    b"Transfer-Encoding: chunked\r\nTransfer-Encoding: x\r\n",
)
CHUNKS = (
    b"zz\r\n{}\r\n0\r\n\r\n",
    b"-1\r\n{}\r\n0\r\n\r\n",
    b"ffffffffffffffffff\r\n{}\r\n",
    b"2\r\n{}XX0\r\n\r\n",
    b"2{}\r\n0\r\n\r\n",
    b"\r\n\r\n",
    b"2;" + b"x" * 100_000 + b"\r\n{}\r\n0\r\n\r\n",
    b"0x2\r\n{}\r\n0\r\n\r\n",
    b"2\r\n{}\r\n0\r\nTrailer\r\n\r\n",
)


@dataclass(frozen=True, slots=True)
class BadMessage:
    """Parts of a message in the order in which they are sent."""

    kind: str
    parts: list[bytes]
    pause_s: float = 0
    """Pause between two parts, in seconds."""
    leaves: bool = False
    """Whether the client closes as soon as it has sent all, without reading."""
    num_right: int = 0
    """Number of its requests that are right, before the malformed one."""


@dataclass(slots=True)
class Ending:
    """The end of a connection as its client saw it."""

    statuses: list[int] = field(default_factory=list)
    has_closed: bool = False
    """Whether the server has closed it, or refused to read on."""

    def is_right(self, message: BadMessage) -> bool:
        """Returns whether a server answers a malformed message so: a refusal, or none at all."""
        refused = list(itertools.dropwhile(lambda status: status == 200, self.statuses))
        num_answered = len(self.statuses) - len(refused)
        was_refused = len(refused) <= 1 and all(400 <= one < 500 for one in refused)
        return self.has_closed and was_refused and num_answered <= message.num_right


class HttpMutations:
    """Draws malformed messages."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self.kinds: tuple[Callable[[], BadMessage], ...] = (
            self._bad_line,
            self._bad_header,
            self._bad_length,
            self._bad_chunk,
            self._header_bomb,
            self._long_url,
            self._half_sent,
            self._slow_bytes,
            self._pipelined,
            self._left_early,
            self._upgrade,
            self._noise,
        )

    def draw(self) -> BadMessage:
        """Returns the next malformed message."""
        return self._draw.choice(self.kinds)()

    def _bad_line(self) -> BadMessage:
        return BadMessage("line", [self._draw.choice(LINES)])

    def _bad_header(self) -> BadMessage:
        header = self._draw.choice(HEADERS)
        head = GET + header + b"\r\n"
        return BadMessage("header", self._cut(head))

    def _bad_length(self) -> BadMessage:
        return BadMessage("length", self._cut(POST + self._draw.choice(LENGTHS) + b"\r\n" + BODY))

    def _bad_chunk(self) -> BadMessage:
        head = POST + b"Transfer-Encoding: chunked\r\n\r\n"
        return BadMessage("chunk", self._cut(head + self._draw.choice(CHUNKS)))

    def _header_bomb(self) -> BadMessage:
        bombs = (
            [b"X-%d: y\r\n" % number for number in range(60_000)],
            [b"X: "] + [b"y" * 65_536] * 64,
            [b"y" * 65_536] * 64,
            [b"X: y\r\n" * 50_000 + b"\r\n"],
        )
        bomb = b"".join(self._draw.choice(bombs))
        return BadMessage("header bomb", [GET, *_pieces(bomb, 16_384)])

    def _long_url(self) -> BadMessage:
        part = self._draw.choice((b"x", b"/..", b"%00", b"?a=b&", b"%"))
        url = b"/" + part * (self._draw.choice((300_000, 3_000_000)) // len(part))
        return BadMessage("url", [b"GET " + url + b" HTTP/1.1\r\nHost: x\r\n\r\n"])

    def _half_sent(self) -> BadMessage:
        return BadMessage("half", [WHOLE[: self._draw.randrange(1, len(WHOLE))]])

    def _slow_bytes(self) -> BadMessage:
        start = self._draw.choice((0, len(WHOLE) - 30))
        parts = [WHOLE[:start]] + [bytes([byte]) for byte in WHOLE[start:]]
        return BadMessage("slow", parts, pause_s=0.2)

    def _pipelined(self) -> BadMessage:
        count = self._draw.choice((1, 7, 40))
        right = (GET + b"\r\n") * count
        return BadMessage("pipelined", self._cut(right + b"\x00\x01\r\n\r\n"), num_right=count)

    def _left_early(self) -> BadMessage:
        stream = WHOLE.replace(b'"max_tokens": 1', b'"stream":true  ')
        message = self._draw.choice((WHOLE, stream, WHOLE * 5, stream * 3))
        sent = message[: self._draw.randrange(1, len(message) + 1)]
        return BadMessage("left", self._cut(sent), leaves=True)

    def _upgrade(self) -> BadMessage:
        protocol = self._draw.choice((b"websocket", b"h2c", b"\xff"))
        head = (
            b"GET /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, close\r\n"
            b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
        )
        more = self._draw.choice((b"", b"\x81\x85\x00\x00\x00\x00hello"))
        return BadMessage("upgrade", [head + b"Upgrade: " + protocol + b"\r\n\r\n" + more])

    def _noise(self) -> BadMessage:
        return BadMessage("noise", self._cut(b"\x80" + self._draw.randbytes(2000)))

    def _cut(self, message: bytes) -> list[bytes]:
        """Returns a message whole or in two parts."""
        place = self._draw.choice((0, self._draw.randrange(len(message))))
        return [part for part in (message[:place], message[place:]) if part]


async def send_raw(host: str, port: int, message: BadMessage) -> Ending:
    """Sends a message on a connection of its own and reads until the server closes it."""
    reader, writer = await asyncio.open_connection(host, port)
    received = b""
    ending = Ending()
    try:
        async with asyncio.timeout(CLOSE_S):
            sending = asyncio.ensure_future(_send(writer, message))
            if message.leaves:
                await sending
                ending.has_closed = True
            else:
                with contextlib.suppress(ConnectionError):
                    while part := await reader.read(65_536):
                        received += part
                ending.has_closed = True
                sending.cancel()
                await asyncio.wait({sending})
    except TimeoutError:
        pass
    finally:
        writer.transport.abort()
    ending.statuses = [int(one) for one in re.findall(rb"HTTP/1\.1 (\d{3}) ", received)]
    return ending


async def _send(writer: asyncio.StreamWriter, message: BadMessage) -> None:
    """Sends all parts, or as many as the server takes."""
    with contextlib.suppress(ConnectionError):
        for part in message.parts:
            writer.write(part)
            await writer.drain()
            if message.pause_s:
                await asyncio.sleep(message.pause_s)


def _pieces(data: bytes, size: int) -> list[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)]
