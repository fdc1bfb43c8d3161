"""The router's web application: its own few routes, and the proxy for all others."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Lifespan

from octavo.errors import Unavailable
from octavo.server.auth import ApiKeys
from octavo.server.errors import add_error_handlers
from octavo.server.head_requests import HeadAsGet
from octavo.server.request_log import RequestLog, log_access
from octavo.server.router.members import Members
from octavo.server.router.metrics import RouterCounts, RouterMetrics
from octavo.server.router.placing import Placer
from octavo.server.router.proxy import RouterProxy
from octavo.server.router.settings import RouterSettings
from octavo.server.same_origin import SameOrigin
from octavo.server.state.key_ring import KeyRing
from octavo.server.time_limit import TimeLimit
from octavo.version import __version__


class RouterRoutes:
    """The router's own routes."""

    def __init__(self, members: Members, counts: RouterCounts) -> None:
        self._members = members
        self._metrics = RouterMetrics(members, counts)

    def routes(self) -> list[Route]:
        return [
            Route("/health", self.ready),
            Route("/ping", self.ready),
            Route("/health/ready", self.ready),
            Route("/health/live", self.live),
            Route("/metrics", self.metrics),
            Route("/router/servers", self.servers),
        ]

    async def ready(self, _: Request) -> Response:
        """Answers 200 while some server is well and the router takes requests, else 503."""
        if self._members.is_stopping:
            raise Unavailable("the router is stopping")
        if not any(member.is_well for member in self._members):
            raise Unavailable(f"no server is well: {self._members.trouble_of(None)}")
        return JSONResponse({"status": "ok"})

    async def live(self, _: Request) -> Response:
        """Answers 200 as long as the router's process answers at all."""
        return JSONResponse({"status": "ok"})

    async def metrics(self, _: Request) -> Response:
        return Response(self._metrics.text(), media_type=CONTENT_TYPE_LATEST)

    async def servers(self, _: Request) -> Response:
        """Shows each server and what is known of it."""
        shown: list[dict[str, Any]] = [
            {
                "number": index,
                "url": member.url,
                "is_well": member.is_well,
                "trouble": member.trouble,
                "models": sorted(member.models),
                "publishes_kv_events": member.capabilities.kv_events is not None,
                "num_running": member.num_running,
                "queued_tokens": member.target.queued_tokens,
                "known_blocks": len(member.target.cached),
            }
            for index, member in enumerate(self._members)
        ]
        return JSONResponse({"object": "list", "data": shown})


def create_router_app(
    members: Members, settings: RouterSettings, *, lifespan: Lifespan[FastAPI] | None = None
) -> FastAPI:
    """Returns the application in front of `members`; something else has to check their health."""
    front = settings.front
    counts = RouterCounts()
    app = FastAPI(title="Octavo router", version=__version__, lifespan=lifespan, openapi_url=None)
    app.router.routes.extend(RouterRoutes(members, counts).routes())
    proxy = RouterProxy(members, Placer(members, settings.routing_policy), settings, counts)
    app.router.routes.append(Route("/{path:path}", proxy))
    add_error_handlers(app)
    app.add_middleware(TimeLimit, limit_s=settings.max_request_s)
    if front.has_keys:
        app.add_middleware(ApiKeys, ring=KeyRing(front), open_metrics=settings.open_metrics)
    else:
        app.add_middleware(SameOrigin)
    app.add_middleware(HeadAsGet)
    app.add_middleware(RequestLog, readers=[log_access] if settings.access_log else [])
    return app
