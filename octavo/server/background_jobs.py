"""Background work on stored objects: background responses and batches.

Starts with the server, resumes the work that an earlier server process left unfinished, and stops
before the engine.
"""

from __future__ import annotations

import asyncio
import logging

from fastapi import Request
from starlette.exceptions import HTTPException

from octavo.server.batch_runner import BatchRunner
from octavo.server.internal_requests import InternalRequests
from octavo.server.openai import chat, completions, embeddings
from octavo.server.openai.responses import routes as response_routes
from octavo.server.openai.responses.runs import ResponseRuns
from octavo.server.state.service import Service
from octavo.server.state.store import Store

logger = logging.getLogger(__name__)

BATCH_ROUTES = (chat.router, completions.router, response_routes.router, embeddings.router)
"""Routes allowed in batches."""


class BackgroundJobs:
    def __init__(self, service: Service, store: Store) -> None:
        self.responses = ResponseRuns(service, store)
        inner = InternalRequests(service, BATCH_ROUTES, background_jobs=self)
        self.batches = BatchRunner(service, store, inner)

    async def resume(self) -> None:
        await self.responses.resume()
        await self.batches.resume()

    async def stop(self) -> None:
        """Cancels all tasks; unfinished work can be resumed."""
        await asyncio.gather(self.responses.stop(), self.batches.stop())


async def get_background_jobs(request: Request) -> BackgroundJobs:
    """Returns the server's background work; raises a 404 without a store."""
    jobs: BackgroundJobs | None = request.app.state.background_jobs
    if jobs is None:
        raise HTTPException(
            404, "this server stores no responses (hint: start it with --state-dir)"
        )
    return jobs
