"""Ollama routes that are not implemented, with hints."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException

NOT_IMPLEMENTED = 501

HINTS = {
    "/api/push": "publishing models is not supported",
    "/api/create": "load a checkpoint with POST /v1/models/load",
    "/api/blobs/{digest}": "load a checkpoint with POST /v1/models/load",
}

router = APIRouter()


async def refuse(request: Request) -> None:
    hint = HINTS[request.scope["route"].path]
    raise HTTPException(
        NOT_IMPLEMENTED, f"{request.url.path}: not supported by this server (hint: {hint})"
    )


for path in HINTS:
    router.add_api_route(
        path, refuse, methods=["POST", "DELETE"], include_in_schema=False, status_code=501
    )
