"""POST /v1/models/load and /v1/models/unload, for operators.

Both respond immediately; GET /v1/models reports progress.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends
from pydantic import Field
from starlette.exceptions import HTTPException

from octavo.api.errors import ConfigError, InvalidRequest, Overloaded, did_you_mean, shown
from octavo.config.engine_config import EngineConfig, option_fields
from octavo.server.http.auth import require_operator
from octavo.server.http.body import Body, parse_body
from octavo.server.openai.models import make_card
from octavo.server.state.adapters import NAME, NAME_RULE
from octavo.server.state.model_spec import ModelSpec
from octavo.server.state.service import Service, get_service
from octavo.server.state.slot import EngineSlot
from octavo.utils.extensions import get_extensions

OF_THE_MACHINE = frozenset(
    {
        "tokenizer",
        "chat_template",
        "prefix_cache_dir",
        "weights_dir",
        "record",
        "cpu_level",
    }
    | {"device", "weights_memory_bytes", "weights_schedule"}
).union(*(each.command_line_only for each in get_extensions()))
"""Options that refer to the machine's files or devices, allowed only on the command line."""
OPTIONS = sorted({*option_fields()} - OF_THE_MACHINE - {"model", "served_model_name"})
"""Engine options that a load may set."""

WITHOUT_ENGINE = ("unloaded", "failed")
"""States in which a model may be loaded again."""
MAX_DRAIN_S = 3600.0
DRAIN_S = 30.0

router = APIRouter()


class LoadBody(Body):
    is_strict = True

    model: Annotated[
        str,
        Field(
            description="a short name, a path on the server or a repository, of 1 to 4096"
            " characters; or the name of a failed or unloaded model, to load it again",
            min_length=1,
            max_length=4096,
        ),
    ]
    name: Annotated[
        str | None, Field(description="model name in the API; default: its own name")
    ] = None
    pin: Annotated[
        bool | None, Field(description="keep the model loaded until this API unloads it")
    ] = None
    options: Annotated[
        dict[str, str | int | float | bool | None] | None,
        Field(description="an object of engine options, which override those of the command line"),
    ] = None


class UnloadBody(Body):
    is_strict = True

    model: Annotated[str, Field(description="name of the served model")]
    timeout_s: Annotated[
        float,
        Field(
            description=f"seconds to wait for running requests, 0 to {MAX_DRAIN_S:g}",
            ge=0,
            le=MAX_DRAIN_S,
        ),
    ] = DRAIN_S


@router.post("/v1/models/load", status_code=202, dependencies=[Depends(require_operator)])
async def load(
    service: Annotated[Service, Depends(get_service)],
    body: Annotated[LoadBody, Depends(parse_body(LoadBody))],
) -> dict[str, Any]:
    """Starts to load a model in its own engine; returns its card."""
    slot = EngineSlot(_make_spec(service, body))
    _make_room(service, slot.name)
    service.models.add(slot)
    service.residency.start(slot)
    return make_card(slot)


@router.post("/v1/models/unload", status_code=202, dependencies=[Depends(require_operator)])
async def unload(
    service: Annotated[Service, Depends(get_service)],
    body: Annotated[UnloadBody, Depends(parse_body(UnloadBody))],
) -> dict[str, Any]:
    """Rejects new requests for a model, lets running ones finish, and shuts down its engine.

    A loading model is cancelled, a failed one is removed.
    """
    if not service.models.answers_to(body.model) and service.models.with_adapter(body.model):
        raise InvalidRequest(
            f"model: {shown(body.model)} is a LoRA adapter",
            hint="unload it with POST /v1/unload_lora_adapter",
            param="model",
        )
    slot = service.models.find(body.model)
    if slot.state == "draining":
        raise HTTPException(409, f"the model `{slot.name}` is being unloaded already")
    service.loader.unload(slot, timeout_s=body.timeout_s)
    return make_card(slot)


def _make_spec(service: Service, body: LoadBody) -> ModelSpec:
    """Returns the model to load; raises InvalidRequest for an invalid name or option."""
    if body.name is not None and not NAME.fullmatch(body.name):
        raise InvalidRequest(
            f"name: got {body.name[:80]!r}, expected {NAME_RULE}",
            param="name",
        )
    known = service.models.get(body.model)
    if known is not None and known.state in WITHOUT_ENGINE:
        options = dict(known.spec.options)
    else:
        options = {**service.loader.defaults, "model": body.model, "served_model_name": None}
    if body.name is not None:
        options["served_model_name"] = body.name
    return ModelSpec.of(options | _check_options(body.options or {}), is_pinned=bool(body.pin))


def _check_options(options: dict[str, Any]) -> dict[str, Any]:
    for name in options:
        if name in OF_THE_MACHINE:
            raise InvalidRequest(
                f"options.{name}: can only be set on the server's command line",
                param="options",
                hint="restart the server with this option",
            )
        if name not in OPTIONS:
            raise InvalidRequest(
                f"options.{name}: unknown option", hint=did_you_mean(name, OPTIONS), param="options"
            )
    try:
        known = EngineConfig.from_options(**options).to_options()
    except ConfigError as error:
        raise InvalidRequest(f"options.{error.message}", hint=error.hint, param="options") from None
    return {name: known[name] for name in options}


def _make_room(service: Service, name: str) -> None:
    """Raises a 409 if the name is taken, Overloaded if there are too many models.

    A failed or unloaded model of the same name is replaced.
    """
    slot = service.models.get(name)
    if slot is not None and slot.state not in WITHOUT_ENGINE:
        raise HTTPException(
            409,
            f"the model `{name}` exists and is {slot.state} (hint: use another name, or unload it"
            f" first)",
        )
    if service.models.with_adapter(name) is not None:
        raise HTTPException(409, f"an adapter is already named `{name}` (hint: use another name)")
    limit = service.settings.max_models
    num_models = service.models.num_in_memory
    if (slot is None or slot.state == "unloaded") and num_models >= limit:
        raise Overloaded(
            f"the server has {num_models} models, expected at most {limit}",
            hint="unload one, or raise max_models",
        )
