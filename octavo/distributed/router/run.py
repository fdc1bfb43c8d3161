"""Runs `octavo route`: listens, checks the servers, and routes until it is stopped.

Stopping drains the router: /health returns 503, new requests are rejected, and running ones may
finish.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import FrameType

import uvicorn
from fastapi import FastAPI

from octavo.api.errors import ConfigError
from octavo.distributed.router.app import create_router_app
from octavo.distributed.router.members import Members
from octavo.distributed.router.monitor import ServerMonitor, monitor_servers
from octavo.distributed.router.settings import RouterSettings
from octavo.distributed.router.upstream import normalize_server_url
from octavo.server.http.limited_protocol import LimitedHttpProtocol
from octavo.server.http.listener import listen
from octavo.server.http.log_format import NOTICES, configure_logging

notices = logging.getLogger(NOTICES)


def route(urls: Sequence[str], settings: RouterSettings) -> None:
    """Runs the router until SIGTERM or SIGINT; raises ConfigError for invalid servers or
    settings.
    """
    server = settings.server
    configure_logging(server)
    if not urls:
        raise ConfigError(
            "url: got none, expected at least one server",
            hint="name the servers, such as octavo route http://10.0.0.1:8000 http://10.0.0.2:8000",
        )
    if len({normalize_server_url(url) for url in urls}) < len(urls):
        raise ConfigError("url: got a server twice", hint="list each server once")
    members, monitor = Members(urls, settings), ServerMonitor(settings)
    listener = listen(server)
    if server.is_open_to_all:
        notices.info(
            "warning: %s is reachable from other machines without --api-key: anyone can use the"
            " servers behind it",
            server.host,
        )
    scheme = "http" if server.ssl_certfile is None else "https"
    address = f"{scheme}://{_format(server.host)}:{listener.getsockname()[1]}"

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with monitor_servers(members, settings, monitor):
            well = sum(member.is_well for member in members)
            notices.info("routing to %d of %d servers on %s", well, len(members), address)
            for index, member in enumerate(members):
                notices.info("server %d: %s %s", index, member.url, member.trouble or "healthy")
            yield

    config = uvicorn.Config(
        create_router_app(members, settings, monitor, lifespan=lifespan),
        http=LimitedHttpProtocol.for_server(server),
        ws="none",
        log_config=None,
        access_log=False,
        lifespan="on",
        ssl_certfile=server.ssl_certfile,
        ssl_keyfile=server.ssl_keyfile,
        proxy_headers=False,
        timeout_graceful_shutdown=settings.shutdown_timeout_s,
    )
    RouterServer(config, members).run(sockets=[listener])


class RouterServer(uvicorn.Server):
    """uvicorn's server, which drains on a signal and then exits with code 0."""

    def __init__(self, config: uvicorn.Config, members: Members) -> None:
        super().__init__(config)
        self._members = members

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Starts to drain; a second Ctrl-C stops at once."""
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self._members.is_stopping = True
        self.should_exit = True


def _format(host: str) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host
