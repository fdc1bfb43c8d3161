"""GET /v1/models and /v1/models/NAME: what is served."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends

from octavo.server.service import Service, service_of

router = APIRouter()


@router.get("/v1/models")
async def list_models(service: Annotated[Service, Depends(service_of)]) -> dict[str, Any]:
    return {"object": "list", "data": [_card(service)]}


@router.get("/v1/models/{name:path}")
async def show_model(name: str, service: Annotated[Service, Depends(service_of)]) -> dict[str, Any]:
    service.check_model(name)
    return _card(service)


def _card(service: Service) -> dict[str, Any]:
    llm = service.slot.llm
    return {
        "id": service.model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "octavo",
        "root": llm.config.model.model,
        "parent": None,
        "max_model_len": llm.info.max_model_len,
    }
