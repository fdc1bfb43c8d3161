"""GET /metrics: engine and server metrics in Prometheus' text format."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Response
from fastapi.responses import PlainTextResponse
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from octavo.server.state.service import Service, get_service

router = APIRouter()


@router.get("/metrics", response_class=PlainTextResponse)
async def read(service: Annotated[Service, Depends(get_service)]) -> Response:
    return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)
