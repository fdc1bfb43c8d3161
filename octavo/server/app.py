"""The web application: routes, errors and keys put together around an engine.

Knows no socket and loads no model; `run.py` does.
"""

from __future__ import annotations

from fastapi import FastAPI
from starlette.types import Lifespan

from octavo.async_llm import AsyncLLM
from octavo.server import admin, cache, jobs, metrics
from octavo.server.auth import ApiKeys
from octavo.server.errors import add_error_handlers
from octavo.server.openai import chat, completions, models
from octavo.server.service import EngineSlot, Service
from octavo.server.settings import ServerSettings
from octavo.version import __version__


def create_app(
    engine: AsyncLLM | EngineSlot,
    settings: ServerSettings | None = None,
    *,
    lifespan: Lifespan[FastAPI] | None = None,
) -> FastAPI:
    """`engine`: one that is ready, or the slot into which one will be put."""
    settings = settings or ServerSettings()
    slot = engine if isinstance(engine, EngineSlot) else EngineSlot(engine)
    app = FastAPI(title="Octavo", version=__version__, lifespan=lifespan)
    server_metrics = metrics.ServerMetrics(slot)
    app.state.service = Service(
        slot,
        settings,
        server_metrics,
        jobs.Jobs(max_jobs=settings.max_jobs, ttl_s=settings.job_ttl_s),
    )
    for router in (
        admin.router,
        models.router,
        completions.router,
        chat.router,
        jobs.router,
        cache.router,
        metrics.router(server_metrics),
    ):
        app.include_router(router)
    add_error_handlers(app)
    if settings.api_key:
        app.add_middleware(ApiKeys, keys=settings.api_key)
    return app
