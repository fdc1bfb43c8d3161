"""Background tasks for each server of a router: health checks and KV event feeds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import zmq.asyncio

from octavo.distributed.router.kv_feed import MemberFeeds
from octavo.distributed.router.members import HealthCheck, Member, Members
from octavo.distributed.router.settings import RouterSettings


class ServerMonitor:
    """Background tasks of all servers. Used in one event loop."""

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self._context: zmq.asyncio.Context = zmq.asyncio.Context()
        self._tasks: dict[int, list[asyncio.Task[None]]] = {}
        """Tasks by server (`id(member)`)."""

    async def begin(self, member: Member) -> None:
        """Checks a server once, then starts its background tasks."""
        settings = self._settings
        check = HealthCheck(member, settings)
        await check.check()
        if member.standing == "gone" or self.follows(member):
            return
        tasks = [asyncio.create_task(check.run())]
        if settings.kv_events and settings.routing_policy == "kv":
            feeds = MemberFeeds(member, self._context, settings.kv_events_secret)
            tasks.append(asyncio.create_task(feeds.run()))
        self._tasks[id(member)] = tasks

    def follows(self, member: Member) -> bool:
        """Returns whether a server has background tasks."""
        return id(member) in self._tasks

    async def end(self, member: Member) -> None:
        """Ends a server's background tasks, if it has any."""
        tasks = self._tasks.pop(id(member), [])
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self, members: Members) -> None:
        await asyncio.gather(*map(self.end, members))
        self._context.destroy(linger=0)


@asynccontextmanager
async def monitor_servers(
    members: Members, settings: RouterSettings, monitor: ServerMonitor
) -> AsyncIterator[None]:
    """Monitors all servers within the context."""
    await asyncio.gather(*map(monitor.begin, members))
    try:
        yield
    finally:
        await monitor.close(members)
        members.close()
