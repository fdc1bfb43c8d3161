"""GET /api/tags, /api/ps and /api/version, POST /api/show: what there is, in Ollama's form.

Sizes and parameters are 0 or empty where the engine's front does not know them.
"""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Depends

from octavo.errors import InvalidRequest
from octavo.server.body import body_of
from octavo.server.ollama.bodies import ShowBody
from octavo.server.ollama.names import find, tagged
from octavo.server.state.service import Service, service_of
from octavo.server.state.slot import EngineSlot
from octavo.version import __version__

NEVER = "9999-12-31T23:59:59Z"
"""Time at which a model is unloaded by itself."""

router = APIRouter()


@router.get("/api/version")
async def version() -> dict[str, str]:
    return {"version": __version__}


@router.get("/api/tags")
async def tags(service: Annotated[Service, Depends(service_of)]) -> dict[str, Any]:
    """Lists the models in any state."""
    return {"models": [_entry(slot) for slot in service.models]}


@router.get("/api/ps")
async def running(service: Annotated[Service, Depends(service_of)]) -> dict[str, Any]:
    """Lists the models that are loaded."""
    return {
        "models": [
            _entry(slot)
            | {
                "expires_at": NEVER,
                "size_vram": 0,
                "context_length": slot.loaded.info.max_model_len,
            }
            for slot in service.models
            if slot.loaded is not None
        ]
    }


@router.post("/api/show")
async def show(
    service: Annotated[Service, Depends(service_of)],
    body: Annotated[ShowBody, Depends(body_of(ShowBody))],
) -> dict[str, Any]:
    """Describes one model."""
    name = body.model or body.name
    if name is None:
        raise InvalidRequest("model: needed, and not given", param="model")
    slot = find(service, name)
    info = {} if slot.loaded is None else {"octavo.context_length": slot.loaded.info.max_model_len}
    return {
        "modelfile": f"FROM {slot.name}\n",
        "parameters": "",
        "template": "",
        "details": _details(),
        "model_info": {"general.architecture": "octavo", "general.basename": slot.name, **info},
        "capabilities": _capabilities(slot),
        "modified_at": _time(slot),
    }


def _entry(slot: EngineSlot) -> dict[str, Any]:
    return {
        "name": tagged(slot.name),
        "model": tagged(slot.name),
        "modified_at": _time(slot),
        "size": slot.memory_bytes,
        "digest": hashlib.sha256(slot.name.encode()).hexdigest(),
        "details": _details(),
    }


def _details() -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": "",
        "family": "",
        "families": [],
        "parameter_size": "",
        "quantization_level": "",
    }


def _capabilities(slot: EngineSlot) -> list[str]:
    """Returns Ollama's words for what a model can do; [] before it has been loaded."""
    if slot.loaded is None:
        return []
    has_text = not slot.loaded.config.model.skip_tokenizer_init
    infills = has_text and slot.loaded.get_tokenizer().infill_format is not None
    found = ["completion", "insert"] if infills else ["completion"]
    if not has_text or not slot.loaded.get_tokenizer().has_chat_template:
        return found
    found.append("tools")
    return found if slot.formats(slot.loaded).reasoning is None else [*found, "thinking"]


def _time(slot: EngineSlot) -> str:
    return datetime.fromtimestamp(slot.created, UTC).isoformat().replace("+00:00", "Z")
