"""GET /health and the routes under it (the only ones that need no key), /ping, /load, /version.

`/health/live` is liveness: the server's process answers. `/health` says that some model takes
requests (or, with `?model=NAME`, this one), `/health/ready` that every one does.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

from fastapi import APIRouter, Depends

from octavo.api.errors import Unavailable
from octavo.server.state.service import Service, service_of
from octavo.server.state.slot import EngineSlot
from octavo.utils.version import __version__

router = APIRouter()


@router.get("/health")
@router.get("/ping")
async def health(
    service: Annotated[Service, Depends(service_of)], model: str | None = None
) -> dict[str, str]:
    """Answers 200 while at least one model, or the one that is named, takes requests, else 503.

    503 stands for models that load or have failed, a server that stops, an engine that is being
    replaced, and one that has ended. A server whose models were all unloaded is well.
    """
    slots = list(service.models) if model is None else [service.models.find(model)]
    if service.models.is_stopping:
        raise Unavailable("the server is stopping")
    if slots and all(slot.trouble for slot in slots):
        raise _unavailable(slots)
    return {"status": "ok"}


@router.get("/health/ready")
async def ready(service: Annotated[Service, Depends(service_of)]) -> dict[str, str]:
    """Answers 200 while every model takes requests, else 503 with what the others do."""
    troubled = [slot for slot in service.models if slot.trouble]
    if troubled or service.models.is_stopping:
        raise _unavailable(troubled)
    return {"status": "ok"}


@router.get("/health/live")
async def live() -> dict[str, str]:
    """Answers 200 as long as the server's process answers at all."""
    return {"status": "ok"}


@router.get("/load")
async def load(service: Annotated[Service, Depends(service_of)]) -> dict[str, Any]:
    """Counts the samples that wait or run, of all models and of each."""
    loads = {
        slot.name: slot.loaded.num_unfinished for slot in service.models if slot.loaded is not None
    }
    return {"server_load": sum(loads.values()), "models": loads}


@router.get("/version")
async def version() -> dict[str, str]:
    return {"version": __version__}


def _unavailable(slots: Iterable[EngineSlot]) -> Unavailable:
    return Unavailable("; ".join(slot.trouble for slot in slots) or "the server is stopping")
