"""The router's web application: its own routes, and a proxy for all others."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Lifespan

from octavo.api.errors import InvalidRequest, Unavailable
from octavo.distributed.router.members import Member, Members
from octavo.distributed.router.metrics import RouterCounts, RouterMetrics
from octavo.distributed.router.monitor import ServerMonitor
from octavo.distributed.router.placing import Placer
from octavo.distributed.router.proxy import RouterProxy
from octavo.distributed.router.roster import Roster
from octavo.distributed.router.settings import RouterSettings
from octavo.distributed.transfer.messages import UNREADABLE
from octavo.server.http.auth import OPERATOR, ApiKeys
from octavo.server.http.errors import add_error_handlers
from octavo.server.http.head_requests import HeadAsGet
from octavo.server.http.request_log import RequestLog, log_access
from octavo.server.http.same_origin import SameOrigin
from octavo.server.http.time_limit import TimeLimit
from octavo.server.settings import ServerSettings
from octavo.server.state.key_ring import KeyRing
from octavo.utils.version import __version__


class RouterRoutes:
    """The router's own routes."""

    def __init__(self, members: Members, counts: RouterCounts, roster: Roster) -> None:
        self._members = members
        self._metrics = RouterMetrics(members, counts)
        self._roster = roster

    def routes(self) -> list[Route]:
        return [
            Route("/health", self.ready),
            Route("/ping", self.ready),
            Route("/health/ready", self.ready),
            Route("/health/live", self.live),
            Route("/metrics", self.metrics),
            Route("/router/servers", self.servers),
            Route("/router/servers", self.join, methods=["POST"]),
            Route("/router/servers/{number:int}", self.leave, methods=["DELETE"]),
            Route("/router/servers/{number:int}/drain", self.drain, methods=["POST"]),
        ]

    async def ready(self, _: Request) -> Response:
        """Returns 200 if at least one server is healthy and the router accepts requests, else
        503.
        """
        if self._members.is_stopping:
            raise Unavailable("the router is stopping")
        if not any(member.accepts_requests for member in self._members):
            raise Unavailable(
                f"no server is healthy: {self._members.describe_trouble(None)}",
                hint="GET /router/servers shows the state of each server",
            )
        return JSONResponse({"status": "ok"})

    async def live(self, _: Request) -> Response:
        """Returns 200 as long as the process responds."""
        return JSONResponse({"status": "ok"})

    async def metrics(self, _: Request) -> Response:
        return Response(self._metrics.text(), media_type=CONTENT_TYPE_LATEST)

    async def servers(self, _: Request) -> Response:
        """Lists the servers and their state."""
        shown = [build_card(index, member) for index, member in enumerate(self._members)]
        return JSONResponse({"object": "list", "data": shown})

    async def join(self, request: Request) -> Response:
        """Adds the server with the body's `url`, also if it was removed before; operators only.
        Returns after the first health check.
        """
        require_router_operator(request, self._roster.server_settings)
        try:
            body = msgspec.json.decode(await request.body(), type=JoinBody)
        except UNREADABLE as error:
            raise InvalidRequest(f"body: {error}", hint='send {"url": "http://..."}') from None
        number = await self._roster.join(body.url)
        return JSONResponse(build_card(number, self._members[number]), 201)

    async def drain(self, request: Request) -> Response:
        """Stops sending requests to a server, which finishes its running ones; operators only."""
        require_router_operator(request, self._roster.server_settings)
        number = self._roster.drain(request.path_params["number"])
        return JSONResponse(build_card(number, self._members[number]))

    async def leave(self, request: Request) -> Response:
        """Drains and removes a server; operators only. Returns at once."""
        require_router_operator(request, self._roster.server_settings)
        number = self._roster.leave(request.path_params["number"])
        return JSONResponse(build_card(number, self._members[number]), 202)


class JoinBody(msgspec.Struct, forbid_unknown_fields=True):
    """Body of POST /router/servers."""

    url: str


def build_card(number: int, member: Member) -> dict[str, Any]:
    """Returns the public description of a server."""
    return {
        "number": number,
        "url": member.url,
        "standing": member.standing,
        "is_well": member.is_well,
        "trouble": member.trouble,
        "models": sorted(member.models),
        "publishes_kv_events": member.capabilities.kv_events is not None,
        "num_running": member.num_running,
        "queued_tokens": member.target.queued_tokens,
        "known_blocks": len(member.target.cached),
    }


def require_router_operator(request: Request, server: ServerSettings) -> None:
    """Raises 403 unless the request has one of the router's keys, or no key is set and only this
    machine can reach the router. An added server receives the prompts of other users.
    """
    if request.scope.get(OPERATOR) or not (server.has_keys or server.is_open_to_all):
        return
    raise HTTPException(
        403, "this route requires the operator key (hint: start the router with --api-key)"
    )


def create_router_app(
    members: Members,
    settings: RouterSettings,
    monitor: ServerMonitor,
    *,
    lifespan: Lifespan[FastAPI] | None = None,
) -> FastAPI:
    """Returns the application for `members`, whose health `monitor` checks."""
    server = settings.server
    counts = RouterCounts()
    app = FastAPI(title="Octavo router", version=__version__, lifespan=lifespan, openapi_url=None)
    placer = Placer(members, settings.routing_policy)
    roster = Roster(members, placer.router, monitor, settings)
    app.router.routes.extend(RouterRoutes(members, counts, roster).routes())
    proxy = RouterProxy(members, placer, settings, counts)
    app.router.routes.append(Route("/{path:path}", proxy))
    add_error_handlers(app)
    app.add_middleware(TimeLimit, limit_s=settings.max_request_s)
    if server.has_keys:
        app.add_middleware(ApiKeys, ring=KeyRing(server), open_metrics=settings.open_metrics)
    else:
        app.add_middleware(SameOrigin)
    app.add_middleware(HeadAsGet)
    app.add_middleware(RequestLog, readers=[log_access] if settings.access_log else [])
    return app
