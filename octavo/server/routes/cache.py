"""The prefix cache over HTTP: contents and hits, pinned prompts, reset."""

from __future__ import annotations

import time
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Request
from pydantic import Field

from octavo.api.async_llm import AsyncLLM
from octavo.api.errors import InvalidRequest
from octavo.engine.protocol.stats import EngineStats
from octavo.frontend.arguments import Prompt as EnginePrompt
from octavo.server.http.auth import require_operator
from octavo.server.http.body import Body, parse_body
from octavo.server.http.connection import cancel_on_disconnect
from octavo.server.openai.bodies import TokenId
from octavo.server.openai.message_bodies import Message
from octavo.server.openai.messages import plain_messages
from octavo.server.output_streams import make_chat_prompt, make_prompt
from octavo.server.state.service import Service, get_service
from octavo.text.ports import Rendering

router = APIRouter()


class PinBody(Body):
    is_strict = True

    model: Annotated[str | None, Field(description="name of the served model")] = None
    prompt: Annotated[str | list[TokenId] | None, Field(description="a string or token ids")] = None
    messages: Annotated[
        list[Message] | None,
        Field(description="beginning of a conversation, instead of a prompt"),
    ] = None
    cache_salt: Annotated[str | None, Field(description="a string")] = None
    ttl_s: Annotated[
        float | None,
        Field(description="seconds to keep the prompt pinned; null: forever, 0: unpin"),
    ] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, Field(description="an object")] = None


class ResetBody(Body):
    is_strict = True

    model: Annotated[str | None, Field(description="name of the served model")] = None
    reset_connector: Annotated[
        bool, Field(description="true to also clear host memory and disk")
    ] = False


@router.post("/v1/cache/pin", dependencies=[Depends(require_operator)])
async def pin(
    request: Request,
    service: Annotated[Service, Depends(get_service)],
    body: Annotated[PinBody, Depends(parse_body(PinBody))],
) -> dict[str, Any]:
    """Computes a prompt prefix if it is not cached, and pins it on disk. For operators: pinned
    blocks reduce the cache for all keys.
    """
    model = await service.model(body.model)
    llm = model.llm
    prompt = await make_prefix_prompt(
        llm,
        body.prompt,
        body.messages,
        cache_salt=body.cache_salt,
        variables=body.chat_template_kwargs,
    )
    num_tokens = await cancel_on_disconnect(
        request.receive, llm.pin_prefix(prompt, ttl_s=body.ttl_s)
    )
    expires_at = None if body.ttl_s is None else int(time.time() + body.ttl_s)
    return {
        "object": "cache.pin",
        "model": model.name,
        "pinned_tokens": num_tokens,
        "expires_at": expires_at,
    }


@router.get("/v1/cache")
async def read(
    service: Annotated[Service, Depends(get_service)], model: str | None = None
) -> dict[str, Any]:
    """Reports the contents of a model's prefix cache by tier, and its hits."""
    llm = service.loaded_model(model).llm
    return describe(
        llm.stats(),
        llm.config.cache.prefix_cache_size if llm.config.cache.prefix_cache_dir else None,
    )


@router.post("/v1/cache/reset", dependencies=[Depends(require_operator)])
async def reset(
    service: Annotated[Service, Depends(get_service)],
    body: Annotated[ResetBody, Depends(parse_body(ResetBody))],
) -> dict[str, bool]:
    """Clears the prefix cache of all keys, for operators. Responds false and does nothing while
    requests run.
    """
    llm = service.loaded_model(body.model).llm
    return {"reset": await llm.reset_prefix_cache(reset_connector=body.reset_connector)}


def describe(stats: EngineStats, size_bytes: int | None) -> dict[str, Any]:
    """Returns the state of the prefix cache.

    `device` has an entry for each cache group; `disk` is null without prefix_cache_dir.
    """
    connector, stored = stats.connector, stats.connector.stored
    disk = {
        "blocks": connector.num_stored_blocks,
        "bytes": stored.num_bytes,
        "size_bytes": size_bytes,
        "pinned_bytes": stored.pinned_bytes,
        "blocks_read": connector.num_fetched,
        "blocks_not_found": connector.num_not_fetched,
        "blocks_written": connector.num_kept,
        "blocks_not_written": connector.num_not_kept,
        "damaged_files": stored.num_damaged,
        "write_errors": stored.num_write_errors,
    }
    return {
        "object": "cache",
        "queried_tokens": stats.prefix_query_tokens,
        "hit_tokens": stats.prefix_hit_tokens,
        "hit_tokens_off_device": stats.external_hit_tokens,
        "blocks_left_out": stats.left_out_blocks,
        "device": [msgspec.structs.asdict(group) for group in stats.groups],
        "host": {
            "slots": connector.num_slots * len(stats.groups),
            "slots_used": connector.num_used_slots,
            "blocks_saved": connector.num_saved,
            "blocks_loaded": connector.num_loaded,
        },
        "disk": disk if size_bytes is not None else None,
    }


async def make_prefix_prompt(
    llm: AsyncLLM,
    prompt: str | list[int] | None,
    messages: list[Message] | None,
    *,
    cache_salt: str | None,
    variables: dict[str, Any] | None,
) -> EnginePrompt:
    """Builds the prompt of a prefix: a text or token ids, or the beginning of a conversation,
    rendered with these template variables. Raises InvalidRequest unless exactly one is given.
    """
    if (prompt is None) == (messages is None):
        raise InvalidRequest("prompt: expected exactly one of prompt and messages", param="prompt")
    if prompt is not None:
        if variables is not None:
            raise InvalidRequest(
                "chat_template_kwargs: requires messages", param="chat_template_kwargs"
            )
        return await make_prompt(llm, prompt, cache_salt=cache_salt)
    rendering = Rendering(False, variables=variables or {})
    plain = plain_messages(messages or [])
    return await make_chat_prompt(llm, plain, cache_salt=cache_salt, rendering=rendering)
