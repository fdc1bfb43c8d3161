"""GET /health and the routes below it (the only ones without a key), /ping, /load, /version.

`/health/live` is liveness: the process responds. `/health` reports whether at least one model (or
with `?model=NAME` this model) accepts requests, `/health/ready` whether all do.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

from fastapi import APIRouter, Depends

from octavo.api.errors import Unavailable
from octavo.server.state.service import Service, get_service
from octavo.server.state.slot import EngineSlot
from octavo.utils.version import __version__

router = APIRouter()


@router.get("/health")
@router.get("/ping")
async def health(
    service: Annotated[Service, Depends(get_service)], model: str | None = None
) -> dict[str, str]:
    """Responds 200 while at least one model, or the named one, accepts requests, else 503.

    503 covers models that are loading or failed, a server that is stopping, and engines that are
    restarting or ended. A server whose models are all unloaded is healthy.
    """
    slots = list(service.models) if model is None else [service.models.find(model)]
    if service.models.is_stopping:
        raise Unavailable("the server is stopping")
    if slots and all(slot.trouble for slot in slots):
        raise _unavailable(slots)
    return {"status": "ok"}


@router.get("/health/ready")
async def ready(service: Annotated[Service, Depends(get_service)]) -> dict[str, str]:
    """Responds 200 while every model accepts requests, else 503 with the state of the others."""
    troubled = [slot for slot in service.models if slot.trouble]
    if troubled or service.models.is_stopping:
        raise _unavailable(troubled)
    return {"status": "ok"}


@router.get("/health/live")
async def live() -> dict[str, str]:
    """Responds 200 while the process is alive."""
    return {"status": "ok"}


@router.get("/load")
async def load(service: Annotated[Service, Depends(get_service)]) -> dict[str, Any]:
    """Counts waiting and running samples, in total and for each model."""
    loads = {
        slot.name: slot.loaded.num_unfinished for slot in service.models if slot.loaded is not None
    }
    return {"server_load": sum(loads.values()), "models": loads}


@router.get("/version")
async def version() -> dict[str, str]:
    return {"version": __version__}


def _unavailable(slots: Iterable[EngineSlot]) -> Unavailable:
    return Unavailable("; ".join(slot.trouble for slot in slots) or "the server is stopping")
