"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, for operators. Names and responses are
vLLM's.
"""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Depends
from fastapi.responses import PlainTextResponse
from pydantic import Field

from octavo.api.errors import InvalidRequest, ModelNotFound, Overloaded
from octavo.server.http.auth import require_operator
from octavo.server.http.body import Body, parse_body
from octavo.server.state.adapters import NAME, NAME_RULE, ServedAdapter, path_within
from octavo.server.state.service import Service, get_service
from octavo.server.state.slot import EngineSlot

router = APIRouter()


class LoadAdapterBody(Body):
    lora_name: Annotated[str, Field(description="model name for requests")]
    lora_path: Annotated[
        str,
        Field(
            description="directory of the PEFT adapter under --lora-dir, of 1 to 4096 characters",
            min_length=1,
            max_length=4096,
        ),
    ]
    load_inplace: Annotated[bool, Field(description="replace an adapter of the same name")] = False
    base_model_name: Annotated[
        str | None, Field(description="served base model; default: the only one")
    ] = None


class UnloadAdapterBody(Body):
    lora_name: Annotated[str, Field(description="adapter name")]


@router.post("/v1/load_lora_adapter", dependencies=[Depends(require_operator)])
async def load_adapter(
    service: Annotated[Service, Depends(get_service)],
    body: Annotated[LoadAdapterBody, Depends(parse_body(LoadAdapterBody))],
) -> PlainTextResponse:
    """Loads an adapter; 400 if its files are invalid.

    Running requests that use an adapter of the same name keep its old weights.
    """
    if not NAME.fullmatch(body.lora_name):
        raise InvalidRequest(
            f"lora_name: got {body.lora_name[:80]!r}, expected {NAME_RULE}",
            param="lora_name",
        )
    slot = _find_slot(service, body)
    _check_name(service, slot, body)
    path = path_within(service.settings.lora_dir, body.lora_path)
    adapter = await asyncio.to_thread(
        ServedAdapter.read, slot.llm, body.lora_name, path, again=body.load_inplace
    )
    _check_name(service, slot, body)
    slot.adapters[adapter.name] = adapter
    return PlainTextResponse(f"Success: LoRA adapter '{adapter.name}' added successfully.")


@router.post("/v1/unload_lora_adapter", dependencies=[Depends(require_operator)])
async def unload_adapter(
    service: Annotated[Service, Depends(get_service)],
    body: Annotated[UnloadAdapterBody, Depends(parse_body(UnloadAdapterBody))],
) -> PlainTextResponse:
    """Removes an adapter's name; running requests continue."""
    slot = service.models.with_adapter(body.lora_name)
    if slot is None:
        raise ModelNotFound(
            f"The lora adapter `{body.lora_name[:200]}` does not exist.",
            param="lora_name",
            hint="GET /v1/models lists the adapters",
        )
    del slot.adapters[body.lora_name]
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _find_slot(service: Service, body: LoadAdapterBody) -> EngineSlot:
    """Returns the model of an adapter; a known adapter keeps its model by default."""
    known = service.models.with_adapter(body.lora_name)
    if body.base_model_name is None and known is not None:
        return known
    return service.models.find(body.base_model_name)


def _check_name(service: Service, slot: EngineSlot, body: LoadAdapterBody) -> None:
    """Raises InvalidRequest if the name is taken, Overloaded if there are too many adapters."""
    known = service.models.with_adapter(body.lora_name)
    if known is not None and not (body.load_inplace and known is slot):
        raise InvalidRequest(
            f"lora_name: the adapter `{body.lora_name}` is already loaded",
            hint="unload it first, or send load_inplace to replace it",
            param="lora_name",
        )
    if known is None and service.models.answers_to(body.lora_name):
        raise InvalidRequest(
            f"lora_name: a model is already named `{body.lora_name}`",
            param="lora_name",
            hint="choose another lora_name",
        )
    max_adapters = service.settings.max_lora_adapters
    if (
        known is None
        and sum(len(model_slot.adapters) for model_slot in service.models) >= max_adapters
    ):
        raise Overloaded(
            f"the server has {max_adapters} adapters, the maximum",
            hint="unload one, or raise max_lora_adapters",
        )
