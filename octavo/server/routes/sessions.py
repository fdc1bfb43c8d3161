"""Named sessions over HTTP: save, restore, list and delete; and llama.cpp's slot actions.

For operators, since saved blocks reduce the cache for all keys and contain their prompts.
"""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request
from pydantic import Field

from octavo.api.errors import InvalidRequest
from octavo.engine.protocol.requests import PrefixRef
from octavo.frontend.sessions import RestoredSession, SavedSession
from octavo.server.http.auth import require_operator
from octavo.server.http.body import Body, parse_body
from octavo.server.http.connection import cancel_on_disconnect
from octavo.server.openai.bodies import TokenId
from octavo.server.openai.message_bodies import Message
from octavo.server.output_streams import member_name
from octavo.server.routes.cache import make_prefix_prompt
from octavo.server.state.served_model import ServedModel
from octavo.server.state.service import Service, get_service

router = APIRouter(dependencies=[Depends(require_operator)])

Services = Annotated[Service, Depends(get_service)]


class SessionBody(Body):
    is_strict = True

    action: Annotated[Literal["save", "restore"], Field(description="'save' or 'restore'")]
    name: Annotated[str, Field(description="name of the session")]
    model: Annotated[str | None, Field(description="name of the served model or adapter")] = None
    prompt: Annotated[
        str | list[TokenId] | None, Field(description="what to save: a string or token ids")
    ] = None
    messages: Annotated[
        list[Message] | None, Field(description="what to save: a conversation, also with images")
    ] = None
    request_id: Annotated[
        str | None,
        Field(description="what to save: id of a response, up to a minute after its end"),
    ] = None
    cache_salt: Annotated[str | None, Field(description="a string")] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, Field(description="an object")] = None


class SlotBody(Body):
    filename: Annotated[str, Field(description="name of the session")] = ""


@router.post("/v1/sessions")
async def change(
    request: Request,
    service: Services,
    body: Annotated[SessionBody, Depends(parse_body(SessionBody))],
) -> dict[str, Any]:
    """Saves the KV blocks of a prompt or a conversation under a name, or reads them back."""
    model = await service.model(body.model)
    if body.action == "restore":
        restored, restore_ms = await _restore(model, body.name)
        return {
            **describe_session(restored.session),
            "loaded_tokens": restored.num_loaded,
            "restore_ms": restore_ms,
            "messages": restored.session.messages,
        }
    model.llm.sessions.check(body.name)
    prefix = await cancel_on_disconnect(request.receive, _get_prefix(model, body))
    messages = None
    if body.messages is not None:
        messages = [message.model_dump(exclude_none=True) for message in body.messages]
    saved, save_ms = await _save(model, body.name, prefix, messages)
    return {**describe_session(saved), "save_ms": save_ms}


@router.get("/v1/sessions")
async def read_all(service: Services, model: str | None = None) -> dict[str, Any]:
    """Lists the sessions in prefix_cache_dir, also those of other models."""
    sessions = await asyncio.to_thread(service.loaded_model(model).llm.sessions.list)
    return {"object": "list", "data": [describe_session(session) for session in sessions]}


@router.get("/v1/sessions/{name}")
async def read(name: str, service: Services, model: str | None = None) -> dict[str, Any]:
    """Returns a session with its messages, without reading its blocks."""
    session = await asyncio.to_thread(service.loaded_model(model).llm.sessions.find, name)
    return {**describe_session(session), "messages": session.messages}


@router.delete("/v1/sessions/{name}")
async def delete(name: str, service: Services, model: str | None = None) -> dict[str, Any]:
    """Deletes a session; its blocks may then be evicted."""
    await asyncio.to_thread(service.loaded_model(model).llm.sessions.delete, name)
    return {"name": name, "object": "session.deleted", "deleted": True}


@router.post("/slots/{slot}")
async def change_slot(
    slot: int,
    action: str,
    service: Services,
    body: Annotated[SlotBody, Depends(parse_body(SlotBody))],
) -> dict[str, Any]:
    """Saves, restores or erases slot 0, as in llama.cpp: the request that finished last."""
    if slot != 0:
        raise InvalidRequest(
            f"slot: got {slot}, expected 0, the request that finished last",
            hint="POST /v1/sessions saves other requests by request_id",
        )
    model = await service.model()
    if action == "erase":
        return {"id_slot": slot, "n_erased": model.llm.forget_last()}
    done: dict[str, Any] = {"id_slot": slot, "filename": body.filename}
    if action == "save":
        saved, save_ms = await _save(model, body.filename, model.llm.get_prefix())
        return done | {
            "n_saved": saved.num_tokens,
            "n_written": saved.num_bytes,
            "timings": {"save_ms": save_ms},
        }
    if action == "restore":
        restored, restore_ms = await _restore(model, body.filename)
        return done | {
            "n_restored": restored.session.num_tokens,
            "n_read": restored.session.num_bytes,
            "timings": {"restore_ms": restore_ms},
        }
    raise InvalidRequest(
        f"action: got {action!r}, expected 'save', 'restore' or 'erase'", param="action"
    )


def describe_session(session: SavedSession) -> dict[str, Any]:
    """Returns a session without its tokens and messages."""
    return {
        "name": session.name,
        "object": "session",
        "model": session.model,
        "adapter": session.adapter or None,
        "created_at": session.created_at,
        "tokens": session.num_tokens,
        "bytes": session.num_bytes,
    }


async def _get_prefix(model: ServedModel, body: SessionBody) -> PrefixRef:
    """Returns what to save; computes it if it is not cached."""
    sources = {"prompt": body.prompt, "messages": body.messages, "request_id": body.request_id}
    given = [name for name, value in sources.items() if value is not None]
    if len(given) != 1:
        got = " and ".join(given) or "none"
        raise InvalidRequest(f"prompt: got {got}, expected one of {', '.join(sources)}")
    if body.request_id is not None:
        return model.llm.get_prefix(member_name(body.request_id, 0))
    prompt = await make_prefix_prompt(
        model.llm,
        body.prompt,
        body.messages,
        cache_salt=body.cache_salt,
        variables=body.chat_template_kwargs,
    )
    return await model.llm.compute_prefix(prompt, adapter=model.adapter)


async def _save(
    model: ServedModel, name: str, prefix: PrefixRef, messages: list[dict[str, Any]] | None = None
) -> tuple[SavedSession, float]:
    """Saves a session; returns it and the time taken in milliseconds."""
    start = time.perf_counter()
    adapter = model.adapter if prefix.adapter_digest else None
    saved = await asyncio.to_thread(
        model.llm.sessions.save, name, prefix, adapter=adapter, messages=messages
    )
    return saved, _elapsed_ms(start)


async def _restore(model: ServedModel, name: str) -> tuple[RestoredSession, float]:
    """Restores a session; returns it and the time taken in milliseconds."""
    start = time.perf_counter()
    restored = await asyncio.to_thread(model.llm.sessions.restore, name, model.adapter)
    return restored, _elapsed_ms(start)


def _elapsed_ms(start: float) -> float:
    return round(1000 * (time.perf_counter() - start), 3)
