"""What goes on beside the requests for each server of a router: its health is checked, and its KV
events are followed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import zmq.asyncio

from octavo.distributed.router.kv_feed import MemberFeeds
from octavo.distributed.router.members import HealthCheck, Member, Members
from octavo.distributed.router.settings import RouterSettings


class Watch:
    """The tasks of all servers. Belongs to one event loop."""

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self._context: zmq.asyncio.Context = zmq.asyncio.Context()
        self._tasks: dict[int, list[asyncio.Task[None]]] = {}
        """Tasks by their server's identity."""

    async def begin(self, member: Member) -> None:
        """Checks a server once, and then again and again for as long as it belongs."""
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
        """Tells whether a server is checked again and again."""
        return id(member) in self._tasks

    async def end(self, member: Member) -> None:
        """Ends what goes on for a server; one that is not watched is left alone."""
        tasks = self._tasks.pop(id(member), [])
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self, members: Members) -> None:
        await asyncio.gather(*map(self.end, members))
        self._context.destroy(linger=0)


@asynccontextmanager
async def watched(members: Members, settings: RouterSettings, watch: Watch) -> AsyncIterator[None]:
    """Watches all servers for as long as the context lasts."""
    await asyncio.gather(*map(watch.begin, members))
    try:
        yield
    finally:
        await watch.close(members)
        members.close()
