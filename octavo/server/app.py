"""The web application: routes, middleware and error handlers around engines.

`run.py` opens the socket and loads models.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import Lifespan

from octavo.api.async_llm import AsyncLLM
from octavo.server.anthropic import messages
from octavo.server.background_jobs import BackgroundJobs
from octavo.server.cohere import chat as cohere_chat
from octavo.server.http.auth import ApiKeys
from octavo.server.http.errors import add_error_handlers
from octavo.server.http.head_requests import HeadAsGet
from octavo.server.http.openapi import describe
from octavo.server.http.request_log import Reader, RequestLog, SlowLog, log_access
from octavo.server.http.same_origin import LOCAL_ORIGIN, SameOrigin
from octavo.server.http.time_limit import TimeLimit
from octavo.server.http.tracing import Tracer
from octavo.server.ignored import IgnoredHeader
from octavo.server.known_models import KnownModels
from octavo.server.loader import ModelLoader
from octavo.server.ollama import embeddings as ollama_embeddings
from octavo.server.ollama import generation as ollama_generation
from octavo.server.ollama import models as ollama_models
from octavo.server.ollama import pulling as ollama_pulling
from octavo.server.ollama import unsupported as ollama_unsupported
from octavo.server.openai import (
    audio,
    batches,
    chat,
    completions,
    embeddings,
    files,
    models,
    realtime,
)
from octavo.server.openai.responses import routes as responses
from octavo.server.pulls import Pulls
from octavo.server.residency import Residency
from octavo.server.routes import (
    adapters,
    admin,
    cache,
    capabilities,
    engine_events,
    jobs,
    metrics,
    model_loading,
    page,
    requests,
    sessions,
    tokenize,
    training,
)
from octavo.server.scoring import classify, pooling_route, rerank, score
from octavo.server.settings import ServerSettings
from octavo.server.state.directory import ModelDirectory
from octavo.server.state.jobs import Jobs
from octavo.server.state.key_ring import KeyRing
from octavo.server.state.metrics import ServerMetrics
from octavo.server.state.pulled_models import PulledModels
from octavo.server.state.service import Service
from octavo.server.state.slot import EngineSlot
from octavo.server.state.store import Store
from octavo.utils.version import __version__

ROUTES = (
    admin,
    audio,
    realtime,
    models,
    model_loading,
    adapters,
    completions,
    chat,
    embeddings,
    classify,
    pooling_route,
    score,
    rerank,
    messages,
    cohere_chat,
    ollama_embeddings,
    ollama_generation,
    ollama_models,
    ollama_pulling,
    ollama_unsupported,
    responses,
    files,
    batches,
    jobs,
    cache,
    sessions,
    capabilities,
    metrics,
    requests,
    tokenize,
    training,
    engine_events,
    page,
)
"""Modules of all routes; the first one that matches a path is used. Those of `training` are served
only with --training-routes.
"""


def create_app(
    engine: AsyncLLM | EngineSlot | ModelDirectory,
    settings: ServerSettings | None = None,
    *,
    loader: ModelLoader | None = None,
    pulled: PulledModels | None = None,
    lifespan: Lifespan[FastAPI] | None = None,
    store: Store | None = None,
) -> FastAPI:
    """Builds the application around a loaded engine, or around slots to be loaded.

    Without a store, responses, files and batches are not stored.
    """
    settings = settings or ServerSettings()
    directory = ModelDirectory.of(engine)
    # FastAPI's own pages run scripts from another host, which could read our page's API key.
    pages: dict[str, Any] = {"docs_url": None, "redoc_url": None}
    app = FastAPI(title="Octavo", version=__version__, lifespan=lifespan, **pages)
    keys = KeyRing(settings)
    loader = loader or ModelLoader(directory)
    known = KnownModels(directory, loader, settings, pulled)
    kept_jobs = Jobs(max_jobs=settings.max_jobs, ttl_s=settings.job_ttl_s)
    app.state.service = Service(
        models=directory,
        loader=loader,
        residency=Residency(directory, loader, settings, known),
        known=known,
        pulls=Pulls(),
        settings=settings,
        metrics=ServerMetrics(directory),
        jobs=kept_jobs,
        keys=keys,
        store=store,
    )
    app.state.background_jobs = None if store is None else BackgroundJobs(app.state.service, store)
    parts = [part for part in ROUTES if part is not training or settings.training_routes]
    for part in parts:
        describe(part.router)
        app.include_router(part.router)
    add_error_handlers(app, [part.router for part in parts])
    local_origins = LOCAL_ORIGIN if settings.allow_local_origins else None
    app.add_middleware(TimeLimit, limit_s=settings.max_request_s)
    if settings.has_keys:
        app.add_middleware(ApiKeys, ring=keys, open_metrics=settings.open_metrics)
    else:
        app.add_middleware(SameOrigin, allowed=settings.allow_origin, local=local_origins)
    app.add_middleware(IgnoredHeader)
    app.add_middleware(HeadAsGet)
    if settings.allow_origin or local_origins is not None:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allow_origin,
            allow_origin_regex=None if local_origins is None else local_origins.pattern,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["*"],
        )
    app.state.tracer = Tracer.of(settings)
    app.state.request_readers = _readers(settings, app.state.tracer)
    app.add_middleware(RequestLog, readers=app.state.request_readers)
    return app


def _readers(settings: ServerSettings, tracer: Tracer | None) -> list[Reader]:
    """Returns the observers of finished requests."""
    readers: list[Reader] = []
    if settings.access_log:
        readers.append(log_access)
    if settings.slow_request_s is not None:
        readers.append(SlowLog(settings.slow_request_s))
    if tracer is not None:
        readers.append(tracer)
    return readers
