"""GET /v1/models and /v1/models/NAME: the cards of the served models, also of those that load."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends

from octavo.errors import Unavailable
from octavo.server.state.service import Service, service_of
from octavo.server.state.slot import EngineSlot

router = APIRouter()


@router.get("/v1/models")
async def list_models(service: Annotated[Service, Depends(service_of)]) -> dict[str, Any]:
    """Lists all models; answers 503 before the first is there, as many wait for this route."""
    if service.models.is_stopping:
        raise Unavailable("the server is stopping")
    if service.models.is_starting:
        reasons = "; ".join(slot.trouble for slot in service.models)
        raise Unavailable(reasons, hint="try again in a few seconds")
    return {"object": "list", "data": [card_of(slot) for slot in service.models]}


@router.get("/v1/models/{name:path}")
async def show_model(name: str, service: Annotated[Service, Depends(service_of)]) -> dict[str, Any]:
    """Shows one model in any state, with the progress of its load or why it failed."""
    return card_of(service.models.find(name))


def card_of(slot: EngineSlot) -> dict[str, Any]:
    """Returns OpenAI's card of a model with its context, what it can do, and its state.

    `max_model_len` and `capabilities` are known once it has been loaded.
    """
    return {
        "id": slot.name,
        "object": "model",
        "created": slot.created,
        "owned_by": "octavo",
        "root": slot.name,
        "parent": None,
        "max_model_len": None if slot.loaded is None else slot.loaded.info.max_model_len,
        "capabilities": slot.capabilities,
        "state": slot.state,
        "reason": slot.reason or None,
    }
