"""`octavo serve`: takes the port, loads the model, serves until told to stop.

The port is taken first, so that one in use is known before a model is loaded. While the model
loads, and while the server drains, requests are answered with 503.
"""

from __future__ import annotations

import asyncio
import json
import logging
import shlex
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from octavo.async_llm import AsyncLLM
from octavo.errors import ConfigError
from octavo.server.app import create_app
from octavo.server.batched_writes import WriteBatch
from octavo.server.request_timeout import TimedHttp
from octavo.server.settings import ServerSettings
from octavo.server.state.slot import EngineSlot, served_name

BACKLOG = 2048

Options = Callable[[], dict[str, Any]]
"""Function that returns the engine's options; it may first fetch a model."""


def serve(options: Options, settings: ServerSettings) -> None:
    """Serves until SIGTERM or SIGINT; raises the error that keeps the engine from starting."""
    listener = take_port(settings.host, settings.port)
    if settings.is_open_to_all:
        _say(
            f"warning: {settings.host} can be reached from other machines and no --api-key is set:"
            " anyone may use this server"
        )
    slot = EngineSlot()
    port = listener.getsockname()[1]
    loader = Loader(slot, options, when_ready=lambda llm: _say(_greeting(llm, settings, port)))

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        loader.start(asyncio.get_running_loop(), when_failed=server.stop)
        yield
        await asyncio.to_thread(slot.close)

    app = create_app(slot, settings, lifespan=lifespan)
    http = TimedHttp.for_server(WriteBatch(), settings.request_timeout_s)
    config = uvicorn.Config(
        app, http=http, log_level="warning", access_log=settings.access_log, lifespan="on"
    )
    if settings.access_log:
        # Config sets the level of uvicorn's own messages here too, and requests are logged at INFO.
        logging.getLogger("uvicorn.access").setLevel(logging.INFO)
    server = Server(config, slot, settings)
    server.run(sockets=[listener])
    if loader.failure is not None:
        raise loader.failure


class Loader:
    """Builds the engine in a daemon thread, and puts it into its slot."""

    def __init__(
        self, slot: EngineSlot, options: Options, *, when_ready: Callable[[AsyncLLM], None]
    ) -> None:
        self.failure: Exception | None = None
        self._slot = slot
        self._options = options
        self._when_ready = when_ready

    def start(self, loop: asyncio.AbstractEventLoop, *, when_failed: Callable[[], None]) -> None:
        threading.Thread(
            target=self._load, args=(loop, when_failed), name="octavo-loader", daemon=True
        ).start()

    def _load(self, loop: asyncio.AbstractEventLoop, when_failed: Callable[[], None]) -> None:
        try:
            llm = AsyncLLM.from_options(report=self._report, **self._options())
        except Exception as error:
            self.failure = error
            _call(loop, when_failed)
        else:
            _call(loop, lambda: self._put(llm))

    def _put(self, llm: AsyncLLM) -> None:
        """Fills the slot, in the event loop; the server may be stopping already."""
        self._slot.fill(llm)
        if not self._slot.is_draining:
            llm.start()
            self._when_ready(llm)

    def _report(self, text: str) -> None:
        _say(text)
        self._slot.report(text)


class Server(uvicorn.Server):
    """The server of uvicorn, which drains on a signal and then ends with exit code 0."""

    def __init__(self, config: uvicorn.Config, slot: EngineSlot, settings: ServerSettings) -> None:
        super().__init__(config)
        self._slot = slot
        self._timeout_s = settings.shutdown_timeout_s

    def stop(self) -> None:
        self._slot.drain()
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Starts the drain; a second Ctrl-C ends it at once."""
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.stop()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drains; requests that still run when the time is up end with an error."""
        closing = asyncio.create_task(self._close_late())
        await super().shutdown(sockets)
        closing.cancel()

    async def _close_late(self) -> None:
        await asyncio.sleep(self._timeout_s)
        await asyncio.to_thread(self._slot.close)


def take_port(host: str, port: int) -> socket.socket:
    """Returns a listening socket; raises ConfigError for a port in use or a foreign address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror or error}",
            hint="choose another with --port or --host",
        ) from error
    return listener


def _greeting(llm: AsyncLLM, settings: ServerSettings, port: int) -> str:
    """Returns the line that names model and URL, and a command to try."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    options = llm.config.model
    model = served_name(llm)
    body: dict[str, Any] = {"prompt": [1, 2, 3]}
    path = "/v1/completions"
    if not options.skip_tokenizer_init:
        path, body = (
            "/v1/chat/completions",
            {
                "messages": [{"role": "user", "content": "What is the capital of France?"}],
                "temperature": 0,
            },
        )
    key = ' -H "Authorization: Bearer $OCTAVO_API_KEY"' if settings.api_key else ""
    curl = (
        f"curl {url}{path} -H 'Content-Type: application/json'{key} -d"
        f" {shlex.quote(json.dumps({'model': model, **body}))}"
    )
    return f"serving {model} on {url}\ntry: {curl}"


def _call(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    """Calls a function in the loop's thread, unless the loop has ended."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(function)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
