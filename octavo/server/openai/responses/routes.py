"""POST /v1/responses, and stored responses: get, stream again, cancel, delete.

Bodies and events are OpenAI's. Only the key that created a response can access it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request, Response
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from octavo.api.errors import ContextTooLong, InvalidRequest, OctavoError
from octavo.server.http.auth import get_owner, get_request_context
from octavo.server.http.body import body_bytes, parse_body
from octavo.server.http.connection import cancel_on_disconnect
from octavo.server.http.errors import error_body
from octavo.server.http.sse import Events, NamedEventStream
from octavo.server.openai.listing import listing
from octavo.server.openai.responses.body import InputTokensBody, ResponseBody
from octavo.server.openai.responses.events import Event, EventWriter, error_event
from octavo.server.openai.responses.history import get_input_items
from octavo.server.openai.responses.mcp_turns import McpTurns, uses_mcp
from octavo.server.openai.responses.output import Piece
from octavo.server.openai.responses.prepare_response import (
    PreparedResponse,
    ResponseRequest,
    count_input_tokens,
    make_failed,
    make_request,
    prepare_response,
    stream_failure,
)
from octavo.server.openai.responses.runs import ResponseRun, ResponseRuns, load_run, make_record
from octavo.server.response_builder import ResponseBuilder
from octavo.server.state.service import Service, get_service
from octavo.server.state.store import Record, Store

router = APIRouter()


async def get_runs(request: Request) -> ResponseRuns | None:
    """Returns the server's background responses; None without a store."""
    jobs = request.app.state.background_jobs
    return None if jobs is None else jobs.responses


ServiceHere = Annotated[Service, Depends(get_service)]
RunsHere = Annotated[ResponseRuns | None, Depends(get_runs)]


@router.post("/v1/responses")
async def create(
    request: Request,
    service: ServiceHere,
    runs: RunsHere,
    body: Annotated[ResponseBody, Depends(parse_body(ResponseBody))],
) -> Response:
    model = await service.model(body.model)
    body.check()
    _check_store(body, service.store)
    store = service.store if body.is_stored else None
    origin = get_request_context(request, body.priority, body.user)
    response_request = await make_request(body, get_owner(request), origin, service.store)
    if store is not None:
        store.check_room()
    if uses_mcp(body, service.settings):
        turns = McpTurns(response_request, model, service.store, service.settings)
        return await _answer_in_turns(request, turns, store, streams=bool(body.stream))
    if body.background and runs is not None:
        run = await runs.start(await prepare_response(response_request, model, service.store))
        if body.stream:
            return TypedEventStream(run.events(-1))
        return JSONResponse(run.response)
    try:
        prepared = await prepare_response(response_request, model, service.store)
        builder = prepared.start()
    except ContextTooLong as error:
        if not body.stream:
            raise
        return TypedEventStream(stream_failure(response_request, model, error))
    service.parsers.keep(response_request.id, prepared.parser, body_bytes(request))
    if body.stream:
        return TypedEventStream(_events(prepared, builder, store))
    last = await cancel_on_disconnect(request.receive, _wait_for_end(prepared, builder, store))
    return JSONResponse(last)


@router.post("/v1/responses/input_tokens")
async def count_tokens(
    request: Request,
    service: ServiceHere,
    body: Annotated[InputTokensBody, Depends(parse_body(InputTokensBody))],
) -> dict[str, Any]:
    """Counts the prompt tokens of a response."""
    model = await service.model(body.model)
    _check_store(body, service.store)
    response_request = await make_request(
        body, get_owner(request), get_request_context(request, None, None), service.store
    )
    num_tokens = await count_input_tokens(response_request, model, service.store)
    return {"object": "response.input_tokens", "input_tokens": num_tokens}


@router.get(
    "/v1/responses/{response_id}",
    responses={200: {"content": {NamedEventStream.media_type: {}}}},
)
async def show(
    response_id: str,
    request: Request,
    service: ServiceHere,
    runs: RunsHere,
    *,
    stream: bool = False,
    starting_after: Annotated[int, Query(ge=0)] | None = None,
) -> Response:
    """Returns a response, or with `stream` replays the events of a background one."""
    record = await _find(service, response_id, get_owner(request))
    run = runs.find(response_id) if runs is not None else None
    if not stream:
        if starting_after is not None:
            raise InvalidRequest("starting_after: requires stream", param="starting_after")
        return JSONResponse(run.response if run is not None else record.body["response"])
    return TypedEventStream(
        _get_run(record, run).events(-1 if starting_after is None else starting_after)
    )


@router.get("/v1/responses/{response_id}/input_items")
async def list_input_items(
    response_id: str,
    request: Request,
    service: ServiceHere,
    *,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Annotated[str, Query(pattern="^(asc|desc)$")] = "desc",
) -> dict[str, Any]:
    """Lists the input items of a response, including those of its conversation, newest first."""
    record = await _find(service, response_id, get_owner(request))
    items = await get_input_items(record, _get_store(service))
    if order == "desc":
        items = items[::-1]
    if after is not None:
        indices = [index for index, item in enumerate(items) if item["id"] == after]
        if not indices:
            raise InvalidRequest(f"after: no item {after!r}", param="after")
        items = items[indices[0] + 1 :]
    shown = items[:limit]
    return listing(shown, has_more=len(items) > limit)


@router.post("/v1/responses/{response_id}/cancel")
async def cancel(
    response_id: str, request: Request, service: ServiceHere, runs: RunsHere
) -> Response:
    """Cancels a background response; one that has ended is unchanged."""
    record = await _find(service, response_id, get_owner(request))
    if runs is None or not record.body["response"]["background"]:
        raise InvalidRequest("Only responses created with background=true can be cancelled.")
    return JSONResponse(await runs.cancel(record))


@router.delete("/v1/responses/{response_id}")
async def delete(
    response_id: str, request: Request, service: ServiceHere, runs: RunsHere
) -> dict[str, Any]:
    """Deletes a response; cancels it if it is running."""
    record = await _find(service, response_id, get_owner(request))
    store = _get_store(service)
    await store.delete(record)
    if runs is not None and runs.find(response_id) is not None:
        await runs.cancel(record)
    return {"id": response_id, "object": "response", "deleted": True}


class TypedEventStream(NamedEventStream):
    """A stream of numbered events, including a final error."""

    def __init__(self, events: Events) -> None:
        super().__init__(events)
        self._next_number = 0

    def format_events(self, payloads: Iterable[Event]) -> bytes:
        events = list(payloads)
        self._next_number = events[-1]["sequence_number"] + 1
        return super().format_events(events)

    def failure(self, error: Exception) -> list[Event]:
        return [error_event(error_body(error)["error"], self._next_number)]


async def _wait_for_end(
    prepared: PreparedResponse, builder: ResponseBuilder, store: Store | None
) -> dict[str, Any]:
    """Returns a response when it has ended and, if requested, is stored."""
    pieces = [prepared.piece(delta) async for (delta,) in builder.deltas()]
    last = prepared.ended(builder, pieces)
    await _store(prepared.response_request, last, store)
    return last


async def _events(
    prepared: PreparedResponse, builder: ResponseBuilder, store: Store | None
) -> AsyncGenerator[list[Event], None]:
    """Yields a response's events; it is stored before the last ones."""
    writer = EventWriter(prepared.first)
    writer.parse_with(prepared.parser)
    yield writer.opening()
    pieces: list[Piece] = []
    try:
        async for (delta,) in builder.deltas():
            pieces.append(prepared.piece(delta))
            new = writer.delta(pieces[-1])
            if new:
                yield new
        last = prepared.ended(builder, pieces)
    except OctavoError as error:
        last = make_failed(prepared.first, error)
    await _store(prepared.response_request, last, store)
    yield writer.closing(last)


async def _answer_in_turns(
    request: Request, turns: McpTurns, store: Store | None, *, streams: bool
) -> Response:
    """Answers a request with MCP tools."""
    events = _mcp_events(turns, *await turns.begin(), store)
    if streams:
        return TypedEventStream(events)
    await cancel_on_disconnect(request.receive, _drain(events))
    return JSONResponse(turns.last)


async def _mcp_events(
    turns: McpTurns, prepared: PreparedResponse, builder: ResponseBuilder, store: Store | None
) -> AsyncGenerator[list[Event], None]:
    """Yields the events of a response with MCP tools; it is stored before the last ones."""
    async with aclosing(turns.events(prepared, builder)) as steps:
        async for new in steps:
            yield new
    await _store(prepared.response_request, turns.last, store)
    yield turns.closing()


async def _drain(events: AsyncGenerator[list[Event], None]) -> None:
    async with aclosing(events):
        async for _ in events:
            pass


async def _store(
    response_request: ResponseRequest, last: dict[str, Any], store: Store | None
) -> None:
    if store is not None:
        await store.add(make_record(response_request, last, store))


def _get_run(record: Record, run: ResponseRun | None) -> ResponseRun:
    """Returns the run to stream from; raises InvalidRequest unless the response is a background
    one.
    """
    if not record.body["response"]["background"]:
        raise InvalidRequest(
            "stream: requires a response created with background=true", param="stream"
        )
    return load_run(record) if run is None else run


def _check_store(body: ResponseBody, store: Store | None) -> None:
    """Raises InvalidRequest for fields that need a store if there is none."""
    if store is not None:
        return
    for name in ("background", "previous_response_id", "store"):
        if getattr(body, name):
            raise InvalidRequest(
                f"{name}: this server stores no responses",
                hint="start it with --state-dir",
                param=name,
            )


def _get_store(service: Service) -> Store:
    if service.store is None:
        raise HTTPException(
            404, "this server stores no responses (hint: start it with --state-dir)"
        )
    return service.store


async def _find(service: Service, response_id: str, owner: str) -> Record:
    """Returns an owner's response; raises a 404 if there is none."""
    record = await _get_store(service).find("response", response_id, owner)
    if record is None:
        raise HTTPException(404, f"Response with id '{response_id}' not found.")
    return record
