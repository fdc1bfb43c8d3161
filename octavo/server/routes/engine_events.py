"""GET /v1/engine/events: live engine events as server-sent events.

A snapshot, then at most ten updates a second; docs/concepts/engine-events.md lists the fields.
Without subscribers the engine produces no events.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response

from octavo.engine.live.feed import FeedReader
from octavo.server.http.auth import require_operator
from octavo.server.http.sse import EventStream
from octavo.server.state.served_model import ServedModel
from octavo.server.state.service import Service, get_service

router = APIRouter()


@router.get(
    "/v1/engine/events",
    response_class=Response,
    responses={200: {"content": {EventStream.media_type: {}}}},
)
async def events(
    request: Request,
    service: Annotated[Service, Depends(get_service)],
    model: str | None = None,
) -> Response:
    """Streams a model's engine events, for operators."""
    require_operator(request)
    served = service.loaded_model(model)
    return EventStream(_events(served, await served.llm.watch()))


async def _events(model: ServedModel, reader: FeedReader) -> AsyncGenerator[list[Any], None]:
    scheduler = model.llm.config.scheduler
    about = {
        "model": model.name,
        "max_model_len": model.llm.info.max_model_len,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "scheduling_policy": scheduler.scheduling_policy,
    }
    try:
        async for event in reader:
            yield [event | about if event["type"] == "snapshot" else event]
    finally:
        reader.close()
