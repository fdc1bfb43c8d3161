"""GET /v1/models and /v1/models/NAME: the served model's card."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends

from octavo.server.state.served_model import ServedModel
from octavo.server.state.service import Service, service_of

router = APIRouter()


@router.get("/v1/models")
async def list_models(service: Annotated[Service, Depends(service_of)]) -> dict[str, Any]:
    return {"object": "list", "data": [_card(service, service.model())]}


@router.get("/v1/models/{name:path}")
async def show_model(name: str, service: Annotated[Service, Depends(service_of)]) -> dict[str, Any]:
    return _card(service, service.model(name))


def _card(service: Service, model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": service.created,
        "owned_by": "octavo",
        "root": model.name,
        "parent": None,
        "max_model_len": model.llm.info.max_model_len,
    }
