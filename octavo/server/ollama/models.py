"""GET /api/tags, /api/ps and /api/version, POST /api/show: what there is, in Ollama's form.

Sizes and families are 0 or empty before a model has been loaded.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Depends

from octavo.checkpoint.local_models import CachedModel, find_cached
from octavo.sampling_params import SamplingParams
from octavo.server.body import body_of
from octavo.server.ollama.bodies import NAMES, ShowBody
from octavo.server.ollama.names import find, tagged
from octavo.server.state.service import Service, service_of
from octavo.server.state.slot import EngineSlot, SlotState
from octavo.version import __version__

NEVER = "9999-12-31T23:59:59Z"
"""Time at which a model is unloaded that stays for good."""

router = APIRouter()


@router.get("/api/version")
async def version() -> dict[str, str]:
    return {"version": __version__}


@router.get("/api/tags")
async def tags(service: Annotated[Service, Depends(service_of)]) -> dict[str, Any]:
    """Lists the models that requests may name, in any state; `load_on_demand` local adds all that
    lie in this machine's caches.
    """
    cached = await service.known.local()
    known = [
        _entry(slot, name, cached)
        for slot in service.models
        for name in (slot.name, *service.models.aliases_of(slot))
    ]
    if service.settings.load_on_demand != "local":
        return {"models": known}
    others = [each for each in cached if not service.models.answers_to(each.name)]
    return {"models": known + [_cached_entry(each) for each in others]}


@router.get("/api/ps")
async def running(service: Annotated[Service, Depends(service_of)]) -> dict[str, Any]:
    """Lists the models that are loaded."""
    return {
        "models": [
            _entry(slot, slot.name)
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
    service: Annotated[Service, Depends(service_of)],
    body: Annotated[ShowBody, Depends(body_of(ShowBody))],
) -> dict[str, Any]:
    """Describes one model."""
    slot = find(service, body.known_as)
    return {
        "modelfile": f"FROM {slot.name}\n",
        "parameters": _parameters(slot),
        "template": _template(slot),
        "details": _details(slot),
        "model_info": {"general.basename": slot.name, **_model_info(slot)},
        "capabilities": _capabilities(slot),
        "modified_at": _time(slot.created),
    }


def _entry(slot: EngineSlot, name: str, cached: Sequence[CachedModel] = ()) -> dict[str, Any]:
    """Describes a model under one of its names; `cached` has its size before it is loaded."""
    num_bytes = slot.facts.num_bytes
    if not num_bytes:
        found = find_cached(slot.spec.model, cached)
        num_bytes = 0 if found is None else found.num_bytes
    row = _row(name, slot.created, num_bytes, slot.state, _details(slot))
    return row | {"digest": _digest(slot.name)}  # the same under all names of a model


def _cached_entry(model: CachedModel) -> dict[str, Any]:
    details = _details(EngineSlot(is_unloaded=True))
    return _row(model.name, model.modified_s, model.num_bytes, "unloaded", details)


def _row(
    name: str, modified_s: float, num_bytes: int, state: SlotState, details: dict[str, Any]
) -> dict[str, Any]:
    return {
        "name": tagged(name),
        "model": tagged(name),
        "modified_at": _time(modified_s),
        "size": num_bytes,
        "digest": _digest(name),
        "details": details,
        "state": state,
    }


def _digest(name: str) -> str:
    """Returns what stands for a model's files, of which this server keeps no digest."""
    return hashlib.sha256(name.encode()).hexdigest()


def _expiry(slot: EngineSlot) -> str:
    """Returns the time at which a model is unloaded if no request comes."""
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
    """Returns GGUF's keys of a model that has been loaded."""
    if slot.loaded is None:
        return {"general.architecture": ""}
    facts = slot.facts
    return {
        "general.architecture": facts.family,
        "general.parameter_count": facts.num_parameters,
        f"{facts.family}.context_length": slot.loaded.info.max_model_len,
    }


def _short_count(number: int) -> str:
    """Returns a number of parameters as Ollama writes it, such as 135M or 1.2B."""
    for unit, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= unit:
            return f"{number / unit:.3g}{letter}"
    return str(number) if number else ""


def _parameters(slot: EngineSlot) -> str:
    """Returns what the model's makers recommend, as lines of Ollama's options."""
    if slot.loaded is None or slot.loaded.pools is not None:
        return ""
    params = slot.loaded.get_default_sampling_params()
    usual = SamplingParams()
    values = {theirs: getattr(params, ours) for theirs, ours in NAMES.items()}
    return "\n".join(
        f"{name} {value}"
        for name, value in values.items()
        if value not in (None, getattr(usual, NAMES[name])) and not isinstance(value, list)
    )


def _template(slot: EngineSlot) -> str:
    """Returns the model's chat template; "" where it has none."""
    if slot.loaded is None or slot.loaded.config.model.skip_tokenizer_init:
        return ""
    return slot.loaded.get_tokenizer().chat_template or ""


def _capabilities(slot: EngineSlot) -> list[str]:
    """Returns Ollama's words for what a model can do; [] before it has been loaded."""
    if slot.loaded is None:
        return []
    if slot.loaded.pools is not None:
        return ["embedding"] if slot.loaded.pools == "embed" else []
    has_text = not slot.loaded.config.model.skip_tokenizer_init
    infills = has_text and slot.loaded.get_tokenizer().infill_format is not None
    found = ["completion", "insert"] if infills else ["completion"]
    if not has_text or not slot.loaded.get_tokenizer().has_chat_template:
        return found
    found.append("tools")
    if "image" in slot.loaded.media:
        found.append("vision")
    return found if slot.formats(slot.loaded).reasoning is None else [*found, "thinking"]


def _time(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat().replace("+00:00", "Z")
