"""GET /api/tags, /api/ps and /api/version, POST /api/show.

A model that is not loaded is described from its files' headers; without local files, sizes and
families are 0 or empty.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Depends

from octavo.api.sampling_params import SamplingParams
from octavo.checkpoint.local_models import CachedModel, find_cached
from octavo.server.http.body import parse_body
from octavo.server.ollama.bodies import NAMES, ShowBody
from octavo.server.ollama.names import known_name, tagged
from octavo.server.state.model_spec import ModelSpec
from octavo.server.state.service import Service, get_service
from octavo.server.state.slot import EngineSlot
from octavo.utils.version import __version__

NEVER = "9999-12-31T23:59:59Z"
"""Expiry time of a model that stays loaded."""

router = APIRouter()


@router.get("/api/version")
async def version() -> dict[str, str]:
    return {"version": __version__}


@router.get("/api/tags")
async def tags(service: Annotated[Service, Depends(get_service)]) -> dict[str, Any]:
    """Lists the models that requests may name, in any state. With `load_on_demand` local, includes
    all cached models.
    """
    known = service.known
    cached = await known.local()
    others: list[EngineSlot] = []
    if service.settings.load_on_demand == "local":
        others = [
            _make_slot(cached_model)
            for cached_model in cached
            if not service.models.answers_to(cached_model.name)
        ]
    slots = [*service.models, *others]
    await known.describe(slots)
    return {
        "models": [
            await _entry(service, slot, name, cached)
            for slot in slots
            for name in (slot.name, *service.models.get_aliases(slot))
        ]
    }


@router.get("/api/ps")
async def running(service: Annotated[Service, Depends(get_service)]) -> dict[str, Any]:
    """Lists the loaded models."""
    return {
        "models": [
            await _entry(service, slot, slot.name)
            | {
                "expires_at": _expiry(slot),
                "size_vram": 0,
                "context_length": slot.loaded.info.max_model_len,
            }
            for slot in service.models
            if slot.loaded is not None
        ]
    }


@router.post("/api/show")
async def show(
    service: Annotated[Service, Depends(get_service)],
    body: Annotated[ShowBody, Depends(parse_body(ShowBody))],
) -> dict[str, Any]:
    slot = await service.residency.find(known_name(service, body.known_as))
    await service.known.describe([slot])
    return {
        "modelfile": f"FROM {slot.name}\n",
        "parameters": _parameters(slot),
        "template": "" if slot.outline is None else slot.outline.chat_template,
        "details": _details(slot),
        "model_info": {"general.basename": slot.name, **_model_info(slot)},
        "capabilities": _capabilities(slot),
        "modified_at": _time(slot.created),
    }


async def _entry(
    service: Service, slot: EngineSlot, name: str, cached: Sequence[CachedModel] = ()
) -> dict[str, Any]:
    """Describes a model under one of its names; the size of a model that is not loaded comes from
    `cached`.
    """
    num_bytes, cached_model = slot.facts.num_bytes, find_cached(slot.spec.model, cached)
    if slot.loaded is None and cached_model is not None:
        num_bytes = num_bytes or cached_model.num_bytes
    return {
        "name": tagged(name),
        "model": tagged(name),
        "modified_at": _time(slot.created if cached_model is None else cached_model.modified_s),
        "size": num_bytes,
        "digest": await service.known.digest(slot),  # the same for all names of a model
        "details": _details(slot),
        "state": slot.state,
    }


def _make_slot(model: CachedModel) -> EngineSlot:
    """Returns a slot that describes a cached model before its first request."""
    options = {"model": str(model.path), "served_model_name": model.name}
    return EngineSlot(ModelSpec.of(options), is_unloaded=True)


def _expiry(slot: EngineSlot) -> str:
    """Returns the time at which an idle model is unloaded."""
    left_s = None if slot.spec.is_pinned else slot.uses.expires_in_s
    return NEVER if left_s is None else _time(time.time() + left_s)


def _details(slot: EngineSlot) -> dict[str, Any]:
    facts = slot.facts
    return {
        "parent_model": "",
        "format": facts.file_format,
        "family": facts.family,
        "families": [facts.family] if facts.family else [],
        "parameter_size": _short_count(facts.num_parameters),
        "quantization_level": facts.weight_format,
    }


def _model_info(slot: EngineSlot) -> dict[str, Any]:
    """Returns the model's metadata by GGUF keys."""
    facts = slot.facts
    if slot.max_model_len is None:
        return {"general.architecture": ""}
    return {
        "general.architecture": facts.family,
        "general.parameter_count": facts.num_parameters,
        f"{facts.family}.context_length": slot.max_model_len,
    }


def _short_count(number: int) -> str:
    """Formats a number of parameters as Ollama does, such as 135M or 1.2B."""
    for unit, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= unit:
            return f"{number / unit:.3g}{letter}"
    return str(number) if number else ""


def _parameters(slot: EngineSlot) -> str:
    """Returns the recommended sampling parameters as lines of Ollama's options."""
    params = None if slot.outline is None else slot.outline.sampling
    if params is None:
        return ""
    defaults = SamplingParams()
    values = {theirs: getattr(params, ours) for theirs, ours in NAMES.items()}
    return "\n".join(
        f"{name} {value}"
        for name, value in values.items()
        if value not in (None, getattr(defaults, NAMES[name])) and not isinstance(value, list)
    )


def _capabilities(slot: EngineSlot) -> list[str]:
    """Returns Ollama's capability names; [] if the files have not been read."""
    known = slot.outline
    if known is None:
        return []
    if known.pools is not None:
        return ["embedding"] if known.pools == "embed" else []
    names = ["completion", "insert"] if known.infills else ["completion"]
    if not known.chat_template:
        return names
    names.append("tools")
    if "image" in known.media:
        names.append("vision")
    return [*names, "thinking"] if known.reasons else names


def _time(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat().replace("+00:00", "Z")
