"""GET /v1/models and /v1/models/NAME: the served model's card."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends

from octavo.server.state.service import Service, service_of

router = APIRouter()


@router.get("/v1/models")
async def list_models(service: Annotated[Service, Depends(service_of)]) -> dict[str, Any]:
    return {"object": "list", "data": [_card(service)]}


@router.get("/v1/models/{name:path}")
async def show_model(name: str, service: Annotated[Service, Depends(service_of)]) -> dict[str, Any]:
    service.check_model(name)
    return _card(service)


def _card(service: Service) -> dict[str, Any]:
    name = service.model_name
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "octavo",
        "root": name,
        "parent": None,
        "max_model_len": service.slot.llm.info.max_model_len,
    }
