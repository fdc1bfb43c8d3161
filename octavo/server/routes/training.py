"""Pause, sleep and weight updates, for training loops and operators.

Paths, queries and bodies are those of vLLM's development server, except that tensors travel in the
body of /update_weights, in safetensors format, instead of over NCCL.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Query, Request
from pydantic import Field
from starlette.exceptions import HTTPException

from octavo.api.async_llm import AsyncLLM
from octavo.api.errors import InvalidRequest
from octavo.server.http.auth import require_operator
from octavo.server.http.body import Body, parse_body, parse_media_type, read_in_time
from octavo.server.state.service import Service, get_service
from octavo.wiring.control.engine_control import PauseMode

TENSORS = "application/octet-stream"
MAX_BYTES_PER_PARAMETER = 8
HEADER_BYTES = 64 << 20
"""Bytes of a safetensors body besides its tensors."""
TIMEOUT_S = 60
"""Seconds for which no data of a body may arrive."""

router = APIRouter(dependencies=[Depends(require_operator)])

Mode = Annotated[PauseMode, Query(description="what happens to unfinished requests")]
Model = Annotated[str | None, Query(description="a model's name")]


async def get_engine(
    service: Annotated[Service, Depends(get_service)], model: Model = None
) -> AsyncLLM:
    """Returns the engine of the named model, or of the only one."""
    llm = service.loaded_model(model).llm
    llm.start()
    return llm


Engine = Annotated[AsyncLLM, Depends(get_engine)]


class FinishBody(Body):
    is_strict = True

    weight_version: Annotated[str | None, Field(description="a name of the new weights")] = None


class VersionBody(Body):
    is_strict = True

    new_version: Annotated[str, Field(description="a name of the weights")]


class InitBody(Body):
    is_strict = True

    init_info: Annotated[dict[str, Any], Field(description="an empty object")]


class UpdateInfo(msgspec.Struct):
    path: str


@router.post("/pause")
async def pause(
    llm: Engine,
    mode: Mode = "abort",
    *,
    clear_cache: bool = True,
) -> dict[str, str]:
    """Computes nothing until /resume: new requests wait."""
    await llm.control.pause_generation(mode, clear_cache=clear_cache)
    return {"status": "paused"}


@router.post("/resume")
async def resume(llm: Engine) -> dict[str, str]:
    """Continues after /pause."""
    await llm.control.resume_generation()
    return {"status": "resumed"}


@router.get("/is_paused")
async def is_paused(llm: Engine) -> dict[str, bool]:
    return {"is_paused": llm.control.is_paused}


@router.post("/sleep")
async def sleep(llm: Engine, level: int = 1, mode: Mode = "abort") -> dict[str, str]:
    """Ends the engine process, which frees its memory, until /wake_up. Levels 1 and 2 are equal."""
    await llm.control.sleep(level, mode)
    return {"status": "sleeping" if level else "paused"}


@router.post("/wake_up")
async def wake_up(llm: Engine, tags: Annotated[list[str] | None, Query()] = None) -> dict[str, str]:
    """Loads the model again. The tags of vLLM are accepted; everything wakes up at once."""
    await llm.control.wake_up()
    return {"status": "awake"}


@router.get("/is_sleeping")
async def is_sleeping(llm: Engine) -> dict[str, bool]:
    return {"is_sleeping": llm.control.is_sleeping}


@router.get("/get_world_size")
async def get_world_size(llm: Engine, *, include_dp: bool = True) -> dict[str, int]:
    """Counts the ranks of the model, with those of data-parallel engines unless `include_dp` is
    false.
    """
    engines = llm.config.fleet.data_parallel_size if include_dp else 1
    return {"world_size": llm.config.backend.num_ranks * engines}


@router.get("/server_info")
async def server_info(llm: Engine, config_format: str = "json") -> dict[str, Any]:
    """Reports what trainers read of vLLM's configuration."""
    return {
        "vllm_config": {
            "weight_transfer_config": {"backend": "http"},
            "model_config": {
                "model": llm.config.model.served_model_name,
                "max_model_len": llm.info.max_model_len,
                "logprobs_mode": "raw_logprobs",
            },
        }
    }


@router.post("/init_weight_transfer_engine")
async def init_weight_transfer_engine(
    body: Annotated[InitBody, Depends(parse_body(InitBody))],
) -> dict[str, str]:
    """Does nothing: tensors need no channel besides HTTP."""
    if body.init_info:
        raise InvalidRequest(
            "init_info: this server receives tensors over HTTP, got the address of an NCCL group",
            hint="send the tensors to POST /update_weights as a safetensors body, and {} here",
            param="init_info",
        )
    return {"message": "Weight transfer initialized"}


@router.post("/start_weight_update")
async def start_weight_update(llm: Engine) -> dict[str, str]:
    """Begins an update in several parts."""
    await llm.control.start_weight_update()
    return {"message": "Weight update started"}


@router.post(
    "/update_weights",
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {
                TENSORS: {"schema": {"type": "string", "format": "binary"}},
                "application/json": {
                    "schema": {
                        "type": "object",
                        "properties": {
                            "update_info": {
                                "type": "object",
                                "properties": {"path": {"type": "string"}},
                            }
                        },
                    }
                },
            },
        }
    },
)
async def update_weights(
    request: Request, llm: Engine, service: Annotated[Service, Depends(get_service)]
) -> dict[str, str]:
    """Replaces weights: by the tensors in the body, or by `update_info.path`, a safetensors file or
    a model directory on the server. Takes effect at /finish_weight_update if an update has started,
    else at once.
    """
    control = llm.control
    if parse_media_type(request.headers.get("content-type", "")) == TENSORS:
        file = control.make_update_file()
        try:
            await _receive(request, llm, file)
            await control.update_weights(file)
        except BaseException:
            file.unlink(missing_ok=True)
            raise
    elif (path := await _parse_path(request, service)).is_dir():
        await control.update_from_model(str(path))
    else:
        await control.update_weights(path)
    return {"message": "Weights updated"}


@router.post("/finish_weight_update")
async def finish_weight_update(
    llm: Engine, body: Annotated[FinishBody, Depends(parse_body(FinishBody))]
) -> dict[str, str]:
    """Applies an update."""
    await llm.control.finish_weight_update(body.weight_version)
    return {"message": "Weight update finished"}


@router.post("/update_weight_version")
async def update_weight_version(
    llm: Engine, body: Annotated[VersionBody, Depends(parse_body(VersionBody))]
) -> dict[str, Any]:
    llm.control.weight_version = body.new_version
    return {"success": True, "new_version": body.new_version}


@router.get("/weight_info")
async def weight_info(llm: Engine) -> dict[str, str]:
    return {"weight_version": llm.control.weight_version}


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(llm: Engine, *, reset_external: bool = False) -> dict[str, bool]:
    """Clears the prefix cache, as POST /v1/cache/reset does."""
    return {"success": await llm.reset_prefix_cache(reset_connector=reset_external)}


async def _parse_path(request: Request, service: Service) -> Path:
    raw = await read_in_time(request, service.settings)
    try:
        path = Path(msgspec.json.decode(raw, type=dict[str, UpdateInfo])["update_info"].path)
    except (msgspec.DecodeError, KeyError):
        raise InvalidRequest(
            'update_info: expected {"update_info": {"path": PATH}}, or a safetensors body with'
            f" Content-Type: {TENSORS}",
            hint="names, dtype_names and shapes announce an NCCL transfer, which is not supported",
            param="update_info",
        ) from None
    if not path.exists():
        raise InvalidRequest(f"update_info.path: {path} does not exist", param="update_info")
    return path


async def _receive(request: Request, llm: AsyncLLM, path: Path) -> None:
    """Writes the body to a file."""
    limit = HEADER_BYTES + MAX_BYTES_PER_PARAMETER * llm.info.model.num_parameters
    num_bytes = 0
    stream = request.stream()
    with path.open("wb") as file:
        while True:
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    part = await anext(stream, None)
            except TimeoutError:
                raise HTTPException(
                    408,
                    f"no data of the body arrived for {TIMEOUT_S} seconds",
                    headers={"Connection": "close"},
                ) from None
            if part is None:
                return
            num_bytes += len(part)
            if num_bytes > limit:
                raise HTTPException(413, f"the body is too large: expected at most {limit} bytes")
            await asyncio.to_thread(file.write, part)
