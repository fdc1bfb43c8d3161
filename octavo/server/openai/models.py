"""GET /v1/models and /v1/models/NAME, including models that are loading.

The format is OpenAI's, or Anthropic's for requests with its version header.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request

from octavo.api.errors import Unavailable
from octavo.config.paths import public_name
from octavo.server.anthropic import cards
from octavo.server.http.error_formats import VERSION_HEADER
from octavo.server.state.adapters import ServedAdapter
from octavo.server.state.service import Service, get_service
from octavo.server.state.slot import EngineSlot

router = APIRouter()


@router.get("/v1/models")
async def list_models(
    request: Request,
    service: Annotated[Service, Depends(get_service)],
    limit: Annotated[int, Query(ge=1, le=1000)] = 20,
    after_id: str | None = None,
    before_id: str | None = None,
) -> dict[str, Any]:
    """Lists all models. Responds 503 until the first one is loaded, since clients poll this route.

    Anthropic clients get pages of `limit` models.
    """
    if service.models.is_stopping:
        raise Unavailable("the server is stopping")
    if service.models.is_starting:
        reasons = "; ".join(slot.trouble for slot in service.models)
        raise Unavailable(reasons)
    await service.known.describe(service.models)
    if VERSION_HEADER in request.headers:
        slots = list(service.models)
        return cards.make_page(slots, limit=limit, after_id=after_id, before_id=before_id)
    visible_cards = [
        card
        for slot in service.models
        for card in _make_cards(slot, service.models.get_aliases(slot))
    ]
    return {"object": "list", "data": visible_cards}


@router.get("/v1/models/{name:path}")
async def show_model(
    name: str, request: Request, service: Annotated[Service, Depends(get_service)]
) -> dict[str, Any]:
    """Shows one model in any state, with its load progress or error."""
    slot, meant = await service.residency.find(name), service.models.resolve(name)
    await service.known.describe([slot])
    if meant in slot.adapters and not service.models.answers_to(meant):
        card = make_adapter_card(slot, slot.adapters[meant])
    elif VERSION_HEADER in request.headers:
        card = cards.make_card(slot)
    else:
        card = make_card(slot)
    return card if meant == name else card | {"id": name}


def _make_cards(slot: EngineSlot, aliases: Iterable[str]) -> list[dict[str, Any]]:
    """Returns the cards of a model, its adapters and its aliases."""
    card = make_card(slot)
    adapters = (make_adapter_card(slot, adapter) for adapter in slot.adapters.values())
    return [card, *adapters, *(card | {"id": alias} for alias in aliases)]


def make_adapter_card(slot: EngineSlot, adapter: ServedAdapter) -> dict[str, Any]:
    """Returns the card of an adapter; `parent` is its model."""
    return make_card(slot) | {
        "id": adapter.name,
        "created": adapter.created,
        "root": public_name(adapter.ref.path),
        "parent": slot.name,
    }


def make_card(slot: EngineSlot) -> dict[str, Any]:
    """Returns OpenAI's card of a model, with its context length, capabilities and state.

    For a model that is not loaded, `max_model_len` is read from its files.
    """
    return {
        "id": slot.name,
        "object": "model",
        "created": slot.created,
        "owned_by": "octavo",
        "root": slot.name,
        "parent": None,
        "max_model_len": slot.max_model_len,
        "capabilities": slot.capabilities,
        "state": slot.state,
        "reason": slot.reason or None,
    }
