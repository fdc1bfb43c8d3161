"""GET /health (the only route that needs no key) and GET /version."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends

from octavo.errors import EngineDead, Unavailable
from octavo.server.service import Service, service_of
from octavo.version import __version__

router = APIRouter()


@router.get("/health")
async def health(service: Annotated[Service, Depends(service_of)]) -> dict[str, str]:
    """Answers 503 while the model loads, while the server stops, and while an engine is replaced
    that hung or died.
    """
    try:
        service.slot.llm.check_health()
    except EngineDead as error:
        raise Unavailable(error.message) from error
    return {"status": "ok"}


@router.get("/version")
async def version() -> dict[str, str]:
    return {"version": __version__}
