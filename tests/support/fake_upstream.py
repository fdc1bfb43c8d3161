"""A server of OpenAI's API that does as a test tells it, in the test's own event loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

Script = Callable[["FakeExchange"], Awaitable[None]]


@dataclass
class FakeExchange:
    """One request, and the means to answer it."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    writer: asyncio.StreamWriter

    async def answer(self, status: int, body: Any, headers: str = "") -> None:
        content = json.dumps(body).encode()
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n{headers}"
        self.writer.write(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
        await self.writer.drain()

    async def begin_stream(self) -> None:
        self.writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        await self.writer.drain()

    async def event(self, text: str) -> None:
        part = f"data: {text}\n\n".encode()
        self.writer.write(b"%x\r\n%b\r\n" % (len(part), part))
        await self.writer.drain()

    async def end_stream(self) -> None:
        await self.event("[DONE]")
        self.writer.write(b"0\r\n\r\n")
        await self.writer.drain()

    def break_off(self) -> None:
        self.writer.transport.abort()


@dataclass
class FakeUpstream:
    """A server; `script` answers what asks for work, and `is_well` says what /health answers."""

    name: str
    script: Script
    models: tuple[str, ...] = ("tiny",)
    is_well: bool = True
    health: Script | None = None
    """Answers /health in place of `is_well`."""
    asked: list[FakeExchange] = field(default_factory=list)
    """Requests that asked for work."""
    url: str = ""

    async def __aenter__(self) -> FakeUpstream:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                first, *lines = head.decode().strip().split("\r\n")
                method, path, _ = first.split(" ")
                headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines)}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                await self._answer(FakeExchange(method, path, headers, body, writer))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, exchange: FakeExchange) -> None:
        if exchange.path == "/health" and self.health is not None:
            await self.health(exchange)
        elif exchange.path == "/health":
            status = 200 if self.is_well else 503
            await exchange.answer(status, {"error": {"message": "not now"}})
        elif exchange.path == "/v1/models":
            await exchange.answer(200, {"data": [{"id": name} for name in self.models]})
        elif exchange.path == "/v1/capabilities":
            await exchange.answer(404, {})
        else:
            self.asked.append(exchange)
            await self.script(exchange)


def saying(name: str) -> Script:
    """Returns a script that answers with a name."""

    async def script(exchange: FakeExchange) -> None:
        await exchange.answer(200, {"by": name})

    return script


async def refusing(exchange: FakeExchange) -> None:
    exchange.break_off()


def with_status(status: int, headers: str = "") -> Script:
    """Returns a script that answers with an error."""

    async def script(exchange: FakeExchange) -> None:
        await exchange.answer(status, {"error": {"message": "no", "code": status}}, headers)

    return script
