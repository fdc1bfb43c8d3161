"""GET /health (the only route that needs no key) and GET /version."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends

from octavo.errors import EngineDead, Unavailable
from octavo.server.state.service import Service, service_of
from octavo.version import __version__

router = APIRouter()


@router.get("/health")
async def health(service: Annotated[Service, Depends(service_of)]) -> dict[str, str]:
    """Answers 200 while the engine works, else 503.

    503 stands for a model that loads, a server that stops, an engine that is being replaced, and
    one that has ended.
    """
    try:
        service.slot.llm.check_health()
    except EngineDead as error:
        raise Unavailable(error.message) from error
    return {"status": "ok"}


@router.get("/version")
async def version() -> dict[str, str]:
    return {"version": __version__}
