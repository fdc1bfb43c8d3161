"""Background responses: computed by tasks of the server and stored at the end.

An accepted response is on disk. If the server stops before the response has ended, the next server
with the same folder recomputes it with the same seed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from starlette.exceptions import HTTPException

from octavo.api.errors import EngineDead, OctavoError, Overloaded, Unavailable
from octavo.frontend.input_processor import RequestContext
from octavo.server.openai.responses.body import ResponseBody
from octavo.server.openai.responses.events import Event, EventWriter
from octavo.server.openai.responses.history import ENDED
from octavo.server.openai.responses.output import Piece
from octavo.server.openai.responses.prepare_response import (
    PreparedResponse,
    ResponseRequest,
    make_failed,
    prepare_response,
)
from octavo.server.output_parser import PLAIN, OutputParser
from octavo.server.response_builder import ResponseBuilder
from octavo.server.state.service import Service
from octavo.server.state.store import Record, Store

logger = logging.getLogger(__name__)

RETRY_S = 0.5
"""Delay before a retry after an unavailable engine or a full queue, in seconds."""


@dataclass(slots=True)
class ResponseRun:
    """A background response and its stream so far."""

    response: dict[str, Any]
    """The response object in its latest state."""
    deltas: list[Piece] = field(default_factory=list)
    parser: OutputParser = PLAIN
    """Parser of its text, set with the prompt."""
    failure: Exception | None = None
    """Error that stopped the response in this server; the next server recomputes it."""
    task: asyncio.Task[None] | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def has_ended(self) -> bool:
        return self.response["status"] in ENDED

    def change(self) -> None:
        """Wakes the followers."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def events(self, after: int) -> AsyncGenerator[list[Event], None]:
        """Yields the stream's events after number `after`, up to its end."""
        first = {
            **self.response,
            "status": "queued",
            "output": [],
            "usage": None,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
        }
        writer = EventWriter(first)
        events, num_sent = writer.opening(), 0
        while True:
            changed = self._changed
            writer.parse_with(self.parser)
            while num_sent < len(self.deltas):
                events += writer.delta(self.deltas[num_sent])
                num_sent += 1
            if self.has_ended:
                events += writer.closing(self.response)
            new = [event for event in events if event["sequence_number"] > after]
            if new:
                yield new
            if self.has_ended:
                return
            if self.failure is not None:
                raise self.failure
            events = []
            await changed.wait()


class ResponseRuns:
    """The background responses of a server, by id."""

    def __init__(self, service: Service, store: Store) -> None:
        self._service = service
        self._store = store
        self._runs: dict[str, ResponseRun] = {}
        self._stopping = False

    async def resume(self) -> None:
        """Resumes the responses that an earlier server did not finish."""
        for record in await self._store.unfinished("response"):
            if record.id not in self._runs:
                self._begin(_load_request(record), record, None)

    async def stop(self) -> None:
        """Cancels the tasks; unfinished responses can be resumed."""
        self._stopping = True
        tasks = [run.task for run in self._runs.values() if run.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def start(self, prepared: PreparedResponse) -> ResponseRun:
        """Stores and starts a new response."""
        self.check_room()
        record = _record(prepared.response_request, prepared.first)
        await self._store.add(record)
        return self._begin(prepared.response_request, record, prepared)

    def check_room(self) -> None:
        """Raises Overloaded if too many responses run in the background."""
        max_jobs = self._service.settings.max_jobs
        if len(self._runs) >= max_jobs:
            raise Overloaded(
                f"{len(self._runs)} responses run in the background, expected at most {max_jobs}",
                hint="try again later, or raise max_jobs",
            )

    def find(self, response_id: str) -> ResponseRun | None:
        """Returns a running response, or None; the caller has checked its owner."""
        return self._runs.get(response_id)

    async def cancel(self, record: Record) -> dict[str, Any]:
        """Cancels a response unless it has ended; returns its final state."""
        run = self._runs.get(record.id)
        if run is not None and run.task is not None and run.failure is None:
            run.task.cancel()
            await asyncio.wait([run.task])
            return run.response
        latest = await self._store.find("response", record.id, record.owner)
        response: dict[str, Any] = (latest or record).body["response"]
        if response["status"] in ENDED:
            return response
        response = {**response, "status": "cancelled"}
        await self._store.replace(_end_record(record, response, [], self._store))
        return response

    # -- in the tasks ------------------------------------------------------------------------------

    def _begin(
        self, response_request: ResponseRequest, record: Record, prepared: PreparedResponse | None
    ) -> ResponseRun:
        run = self._runs[response_request.id] = ResponseRun(dict(record.body["response"]))
        run.task = asyncio.create_task(self._run_to_end(run, response_request, record, prepared))
        return run

    async def _run_to_end(
        self,
        run: ResponseRun,
        response_request: ResponseRequest,
        record: Record,
        prepared: PreparedResponse | None,
    ) -> None:
        """Computes and stores a response; leaves it unfinished if the server stops."""
        try:
            last = await self._compute(run, response_request, prepared)
            ended = _end_record(record, last, run.deltas, self._store)
            ended.body["reading"] = run.parser.dump()
            await self._store.replace(ended)
            run.response = last
        except HTTPException as error:
            run.failure = error
        except asyncio.CancelledError:
            run.failure = Unavailable("the server is stopping")
            raise
        finally:
            run.change()
            if run.failure is None:
                del self._runs[response_request.id]

    async def _compute(
        self, run: ResponseRun, response_request: ResponseRequest, prepared: PreparedResponse | None
    ) -> dict[str, Any]:
        """Returns the final response object; retries on another engine if the first one ends."""
        while True:
            try:
                return await self._compute_once(run, response_request, prepared)
            except EngineDead:
                prepared = None
                await asyncio.sleep(RETRY_S)
            except OctavoError as error:
                return make_failed(run.response, error)

    async def _compute_once(
        self, run: ResponseRun, response_request: ResponseRequest, prepared: PreparedResponse | None
    ) -> dict[str, Any]:
        """Returns the final response object of one engine, or its state when it was cancelled."""
        builder: ResponseBuilder | None = None
        num_stored_chars = sum(len(text) for text, _ in run.deltas)
        try:
            if prepared is None:
                prepared = await self._retry(lambda: self._prepare(response_request))
            current = prepared
            run.parser = current.parser
            builder = await self._retry(lambda: _started(current))
            num_bytes = len(response_request.body.model_dump_json(exclude_none=True))
            self._service.parsers.keep(response_request.id, current.parser, num_bytes)
            run.response = {**run.response, "status": "in_progress"}
            async for (delta,) in builder.deltas():
                text, logprobs = prepared.piece(delta)
                new = text[max(0, num_stored_chars - delta.start) :]
                if new or delta.start >= num_stored_chars:
                    run.deltas.append((new, logprobs))
                    run.change()
            return prepared.ended(builder, run.deltas)
        except asyncio.CancelledError:
            if self._stopping:
                raise
            if prepared is None or builder is None:
                return {**run.response, "status": "cancelled"}
            return prepared.ended(builder, run.deltas, "cancelled")

    async def _prepare(self, response_request: ResponseRequest) -> PreparedResponse:
        record = self._service.background_record(response_request.owner)
        try:
            model = await replace(self._service, record=record).model(response_request.body.model)
            return await prepare_response(response_request, model, self._store)
        finally:
            record.release()  # from here on the submitted request keeps the model in memory

    async def _retry(self, work: Callable[[], Awaitable[Any]]) -> Any:
        """Retries work until an engine is available and its queue has room."""
        while True:
            try:
                return await work()
            except (Overloaded, Unavailable) as error:
                pause_s = error.retry_after_s if isinstance(error, Overloaded) else RETRY_S
                await asyncio.sleep(min(pause_s, 10 * RETRY_S))


async def _started(prepared: PreparedResponse) -> ResponseBuilder:
    return prepared.start()


def load_run(record: Record) -> ResponseRun:
    """Returns a stored background response as a run, to replay its stream."""
    parser = OutputParser.load(record.body.get("reading"))
    stored_deltas = record.body["deltas"] or []
    deltas = [(one, []) if isinstance(one, str) else (one[0], one[1]) for one in stored_deltas]
    return ResponseRun(record.body["response"], deltas, parser)


def make_record(
    response_request: ResponseRequest, response: dict[str, Any], store: Store
) -> Record:
    """Returns the record of a foreground response."""
    return _end_record(_record(response_request, response), response, None, store)


def _record(response_request: ResponseRequest, response: dict[str, Any]) -> Record:
    request = response_request.body.model_dump(exclude_none=True)
    origin = {
        "priority": response_request.origin.priority,
        "tenant": response_request.origin.tenant,
    }
    return Record(
        response_request.id,
        "response",
        response_request.owner,
        {
            "response": response,
            "items": response_request.items,
            "deltas": None,
            "request": request,
            "origin": origin,
        },
        response_request.created_at,
    )


def _end_record(
    record: Record, response: dict[str, Any], deltas: list[Piece] | None, store: Store
) -> Record:
    """Returns the record of a response in its final state; its expiry is counted from the current
    time.
    """
    stored_deltas: list[Piece | str] | None = None
    if deltas is not None:
        stored_deltas = [piece if piece[1] else piece[0] for piece in deltas]
    body = {"response": response, "items": record.body["items"], "deltas": stored_deltas}
    return replace(record, body=body, expires_at=store.expires_at)


def _load_request(record: Record) -> ResponseRequest:
    """Restores the request of an unfinished record."""
    body = ResponseBody.model_validate_json(msgspec.json.encode(record.body["request"]))
    return ResponseRequest(
        record.id,
        record.owner,
        body,
        RequestContext(**record.body["origin"]),
        record.body["items"],
        record.created_at,
    )
