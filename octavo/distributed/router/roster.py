"""Adds, drains and removes servers while a router runs.

A removed server keeps its number in case it returns; its running requests may finish.
"""

from __future__ import annotations

import asyncio
import time

from starlette.exceptions import HTTPException

from octavo.api.errors import ConfigError, InvalidRequest
from octavo.distributed.router.members import NOT_CHECKED, Member, Members
from octavo.distributed.router.monitor import ServerMonitor
from octavo.distributed.router.settings import RouterSettings
from octavo.distributed.router.upstream import normalize_server_url
from octavo.engine.routing.router import Router
from octavo.server.settings import ServerSettings

MAX_SERVERS = 256
"""Maximum number of servers, including removed ones."""
WAIT_S = 0.05
"""Interval at which a draining server is checked, in seconds."""


class Roster:
    """Changes the servers of a router. Used in one event loop."""

    def __init__(
        self, members: Members, router: Router, monitor: ServerMonitor, settings: RouterSettings
    ) -> None:
        self._members = members
        self._router = router
        self._monitor = monitor
        self._settings = settings
        self._leaving: dict[int, asyncio.Task[None]] = {}
        """Tasks that wait until a draining server has no requests, by the server's number."""

    @property
    def server_settings(self) -> ServerSettings:
        return self._settings.server

    async def join(self, url: str) -> int:
        """Adds a server, or a removed server again, and checks it once; returns its number."""
        try:
            url = normalize_server_url(url)
        except ConfigError as error:
            raise InvalidRequest(error.message, hint=error.hint) from None
        for number, member in enumerate(self._members):
            if member.url == url:
                await self._return(number, member)
                return number
        if len(self._members) >= MAX_SERVERS:
            raise InvalidRequest(
                f"url: the router has {MAX_SERVERS} servers, the maximum",
                hint="remove a server with DELETE /router/servers/NUMBER",
            )
        member = self._members.add(url)
        self._router.targets.append(member.target)
        number = len(self._members) - 1
        await self._monitor.begin(member)
        return number

    async def _return(self, number: int, member: Member) -> None:
        leaving = self._leaving.pop(number, None)
        if leaving is not None:
            leaving.cancel()
        member.standing = "in"
        if not self._monitor.follows(member):
            await self._monitor.begin(member)

    def drain(self, number: int) -> int:
        """Stops sending requests to a server."""
        member = self._member(number)
        if member.standing == "in":
            member.standing = "draining"
        return number

    def leave(self, number: int) -> int:
        """Drains a server and removes it when it has no requests, or after the router's shutdown
        timeout.
        """
        self.drain(number)
        if self._member(number).standing != "gone" and number not in self._leaving:
            self._leaving[number] = asyncio.create_task(self._let_go(number))
        return number

    async def _let_go(self, number: int) -> None:
        member = self._members[number]
        end = time.monotonic() + self._settings.shutdown_timeout_s
        while member.num_running and time.monotonic() < end:
            await asyncio.sleep(WAIT_S)
        await self._monitor.end(member)
        member.standing, member.trouble = "gone", NOT_CHECKED
        member.target.cached.clear()
        member.client.abort_waiting("the server has left the router")
        self._leaving.pop(number, None)

    def _member(self, number: int) -> Member:
        if not 0 <= number < len(self._members):
            raise HTTPException(404, f"no server {number}, expected 0 to {len(self._members) - 1}")
        return self._members[number]
