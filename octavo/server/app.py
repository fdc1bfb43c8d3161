"""The web application: routes, errors and keys put together around an engine.

Knows no socket and loads no model; `run.py` does.
"""

from __future__ import annotations

from fastapi import FastAPI
from starlette.types import Lifespan

from octavo.async_llm import AsyncLLM
from octavo.server.auth import ApiKeys
from octavo.server.errors import add_error_handlers
from octavo.server.head_requests import HeadAsGet
from octavo.server.openai import chat, completions, models
from octavo.server.routes import admin, cache, engine_events, jobs, metrics, page, requests
from octavo.server.settings import ServerSettings
from octavo.server.state.jobs import Jobs
from octavo.server.state.metrics import ServerMetrics
from octavo.server.state.service import Service
from octavo.server.state.slot import EngineSlot
from octavo.version import __version__


def create_app(
    engine: AsyncLLM | EngineSlot,
    settings: ServerSettings | None = None,
    *,
    lifespan: Lifespan[FastAPI] | None = None,
) -> FastAPI:
    """Returns the application around an engine that is ready, or around the slot of one to come."""
    settings = settings or ServerSettings()
    slot = engine if isinstance(engine, EngineSlot) else EngineSlot(engine)
    app = FastAPI(title="Octavo", version=__version__, lifespan=lifespan)
    kept_jobs = Jobs(max_jobs=settings.max_jobs, ttl_s=settings.job_ttl_s)
    app.state.service = Service(slot, settings, ServerMetrics(slot), kept_jobs)
    routes = (admin, models, completions, chat, jobs, cache, metrics, requests, engine_events, page)
    for part in routes:
        app.include_router(part.router)
    add_error_handlers(app)
    if settings.api_key:
        app.add_middleware(ApiKeys, keys=settings.api_key)
    app.add_middleware(HeadAsGet)
    return app
