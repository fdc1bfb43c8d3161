"""Forwards requests to servers and streams their responses back.

Until the first byte of a response has arrived, a request may be retried on another server if the
first one is unreachable, loading, stopping or overloaded. After that nothing is retried.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.api.errors import Unavailable
from octavo.distributed.router.members import Members
from octavo.distributed.router.metrics import RouterCounts
from octavo.distributed.router.placing import PlacedRequest, Placer
from octavo.distributed.router.prompts import AskedRequest, PromptReader
from octavo.distributed.router.settings import RouterSettings
from octavo.distributed.router.upstream import (
    HeaderList,
    UpstreamAnswer,
    UpstreamLost,
    UpstreamRequest,
)
from octavo.engine.routing.job import RoutingJob
from octavo.server.http.body import read_in_time
from octavo.server.http.connection import cancel_on_disconnect
from octavo.server.http.error_formats import get_error_format
from octavo.server.http.errors import error_response, make_fault
from octavo.server.http.request_log import ID_HEADER
from octavo.server.http.sse import DONE
from octavo.server.http.time_limit import DEADLINE, Deadline
from octavo.server.state.request_record import get_record


class Way(Enum):
    """How the server of a request is selected.

    A path that is not in the table must be requested from the server itself.
    """

    PLACED = auto()
    """Chosen by the policy: the request asks for work."""
    ANY = auto()
    """Any server that is well: all answer alike."""
    HOME = auto()
    """The server where the sender's files and batches are."""
    KEPT = auto()
    """The server that has the stored thing which the path names."""


@dataclass(frozen=True, slots=True)
class PassedRoute:
    """A forwarded route."""

    methods: frozenset[str]
    pattern: re.Pattern[str]
    way: Way


def _row(methods: str, pattern: str, way: Way) -> PassedRoute:
    return PassedRoute(frozenset(methods.split()), re.compile(pattern), way)


TABLE = (
    _row(
        "POST",
        r"/v1/(chat/completions|completions|embeddings|messages(/count_tokens)?|responses|rerank"
        r"|score|classify)",
        Way.PLACED,
    ),
    _row("POST", r"(/cohere)?/v2/chat|/api/(chat|generate|embed|embeddings)", Way.PLACED),
    _row("POST", r"(/v1)?/(tokenize|detokenize|apply-template)", Way.ANY),
    _row("GET", r"/v1/models(/.+)?|/v1/capabilities|(/v1)?/tokenizer_info", Way.ANY),
    _row("GET", r"/api/(version|tags|ps)|/version", Way.ANY),
    _row("POST", r"/api/show", Way.ANY),
    _row("GET POST DELETE", r"/v1/(files|batches)(/.*)?", Way.HOME),
    _row("GET POST DELETE", r"/v1/responses/[^/]+(/[a-z_]+)?", Way.KEPT),
)


def get_way(method: str, path: str) -> Way | None:
    """Returns how the server of a request is selected; None if the path is not forwarded, for
    example because it contains "..".
    """
    if not {".", ".."}.isdisjoint(path.split("/")):
        return None
    for row in TABLE:
        if method in row.methods and row.pattern.fullmatch(path):
            return row.way
    return None


SERVER_HEADER = b"x-octavo-server"
"""Header of an answer whose value is the number of the server that gave it."""
BY_THE_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer"
    b" transfer-encoding upgrade host content-length expect date server".split()
)
"""Headers that are about one connection, or that both ends write themselves."""
ELSEWHERE = frozenset({429, 503})
"""Statuses with which a server says that another one may do better."""
CACHED_TOKENS = re.compile(rb'"cached_tokens": ?(\d+)')
NO_JOB = RoutingJob(0)
SERVER_GONE = Unavailable(
    "the server that computed this answer has gone", hint="send the request again"
)


@dataclass(slots=True)
class PassedOn:
    """A request with everything that is needed to send it, possibly several times."""

    way: Way
    request: UpstreamRequest
    asked: AskedRequest
    sender: bytes
    """Value of the header with the client's key; b"" without one."""


class RouterProxy:
    """ASGI application for all paths except the router's own."""

    def __init__(
        self,
        members: Members,
        placer: Placer,
        settings: RouterSettings,
        counts: RouterCounts,
    ) -> None:
        self._members = members
        self._placer = placer
        self._reader = PromptReader(members, reads_names=placer.reads_names)
        self._settings = settings
        self._front = settings.front
        self._counts = counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            passed = await self._read(scope, receive)
            cards = self._members.listed() if _asks_for_models(scope) else None
            if cards is not None:
                body = msgspec.json.encode({"object": "list", "data": cards})
                await Response(body, media_type="application/json")(scope, receive, send)
                return
            with suppress(ClientDisconnect):
                await cancel_on_disconnect(receive, self._pass_on(passed, scope, receive, send))
        except (HTTPException, Unavailable) as error:
            self._counts.add("refusals", str(make_fault(error).status))
            await error_response(error, get_error_format(scope))(scope, receive, send)

    async def _read(self, scope: Scope, receive: Receive) -> PassedOn:
        """Reads a complete request; raises an error if the router rejects it."""
        path = scope["path"]
        way = get_way(scope["method"], path)
        if way is None:
            raise HTTPException(
                404,
                f"{scope['method']} {path} is not passed on (hint: ask the server itself)",
            )
        if self._members.is_stopping:
            raise Unavailable("the router is stopping")
        request = Request(scope, receive)
        body = await read_in_time(request, self._front)
        sender = next(
            (v for k, v in scope["headers"] if k in (b"authorization", b"x-api-key")), b""
        )
        asked = AskedRequest(NO_JOB)
        if way is Way.PLACED:
            asked = await self._reader.read(path, body, sender)
        elif way is Way.ANY:
            asked = AskedRequest(NO_JOB, self._reader.get_model(path, body))
        elif way is Way.KEPT:
            asked = AskedRequest(NO_JOB, response_id=path.split("/")[3])
        target = (scope.get("raw_path") or path.encode()).decode("latin-1")
        if scope["query_string"]:
            target += "?" + scope["query_string"].decode("latin-1")
        upstream = UpstreamRequest(scope["method"], target, self._headers(scope), body)
        return PassedOn(way, upstream, asked, sender)

    def _headers(self, scope: Scope) -> HeaderList:
        """Returns the headers for the server: the client's, with its address, the request id, and
        the servers' API key.
        """
        key = self._settings.server_api_key
        dropped = BY_THE_HOP | {ID_HEADER.lower().encode(), b"x-forwarded-for"}
        if key is not None:
            dropped |= {b"authorization", b"x-api-key"}
        kept = [pair for pair in scope["headers"] if pair[0] not in dropped]
        if key is not None:
            kept.append((b"authorization", b"Bearer " + key.encode()))
        if scope.get("client"):
            before = [v for k, v in scope["headers"] if k == b"x-forwarded-for"]
            address = b", ".join([*before, scope["client"][0].encode()])
            kept.append((b"x-forwarded-for", address))
        kept.append((ID_HEADER.lower().encode(), get_record(scope).request_id.encode()))
        return kept

    async def _pass_on(self, passed: PassedOn, scope: Scope, receive: Receive, send: Send) -> None:
        """Tries one server after another until one has begun to respond."""
        tried: set[int] = set()
        refusal: Response | None = None
        while len(tried) < self._settings.max_attempts:
            placement = await self._place(passed, tried)
            if placement is None:
                break
            tried.add(placement.index)
            member = placement.member
            try:
                answer = await member.client.ask(passed.request)
                if answer.status in ELSEWHERE and passed.way in (Way.PLACED, Way.ANY):
                    refusal = await self._refused(answer, placement)
                    continue
                try:
                    await self._hand_on(answer, placement, scope, send)
                finally:
                    member.client.finish(answer)
                return
            except UpstreamLost as error:
                member.note_failure(str(error))
                member.target.cached.clear()
                self._counts.add("retries", str(placement.index), "lost")
            finally:
                placement.end()
        if refusal is None:
            trouble = self._members.get_trouble(passed.asked.model)
            raise Unavailable(
                f"no server can answer: {trouble or 'none has this model or thing'}",
                hint="try again in a few seconds",
            )
        await refusal(scope, receive, send)

    async def _place(self, passed: PassedOn, tried: set[int]) -> PlacedRequest | None:
        """Returns the next server for a request; None if there are no more."""
        job = passed.asked.job
        wanted = passed.asked.response_id
        if passed.way is Way.PLACED and wanted is None:
            placement = self._placer.place(job, passed.asked.model, tried)
            if placement is not None and not tried:
                self._counts.add("prompt_tokens", by=job.num_tokens)
                self._counts.add("predicted_cached_tokens", by=placement.num_cached)
            return placement
        if passed.way is Way.ANY:
            index = self._placer.least_busy(tried, passed.asked.model)
        elif tried:
            return None
        elif passed.way is Way.HOME:
            index = self._placer.get_home(passed.sender)
        else:
            assert wanted is not None, "its path or its body names it"
            index = await self._placer.keeper_of(wanted, passed.request.headers)
            if index is None:
                index = self._placer.least_busy(tried)  # it says that there is no such thing
        return None if index is None else self._placer.place_on(index, job)

    async def _refused(self, answer: UpstreamAnswer, placement: PlacedRequest) -> Response:
        """Returns the error response of a server, in case no other server succeeds."""
        member = placement.member
        try:
            body = await answer.rest()
        finally:
            member.client.finish(answer)
        self._counts.add("retries", str(placement.index), str(answer.status))
        headers = dict(_decoded(_passable(answer.headers)))
        return Response(body, answer.status, headers)

    async def _hand_on(
        self, answer: UpstreamAnswer, placement: PlacedRequest, scope: Scope, send: Send
    ) -> None:
        """Streams a response to the client."""
        number = str(placement.index)
        self._counts.add("requests", number, str(answer.status))
        headers = [*_passable(answer.headers), (SERVER_HEADER, number.encode())]
        length = answer.header(b"content-length")
        if length:
            headers.append((b"content-length", length))
        is_stream = answer.header(b"content-type").startswith(b"text/event-stream")
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        deadline = scope.get(DEADLINE, Deadline())
        try:
            async with asyncio.timeout_at(deadline.at_s) as limit:
                while data := await answer.part():
                    if is_stream:
                        placement.yielded(data.count(b"data:"))
                    self._note_cached(data)
                    await send({"type": "http.response.body", "body": data, "more_body": True})
        except (UpstreamLost, TimeoutError) as error:
            fault: Exception = SERVER_GONE
            if limit.expired():
                fault = deadline.error
            else:
                placement.member.note_failure(str(error))
                self._counts.add("broken_answers", number)
            if not is_stream:
                return  # the connection is closed before the answer's end, which clients notice
            part = _last_event(scope, fault)
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _note_cached(self, data: bytes) -> None:
        """Counts the cached tokens that a response reports, if a single chunk contains the
        number.
        """
        if b"cached_tokens" in data:
            self._counts.add("found_cached_tokens", by=sum(map(int, CACHED_TOKENS.findall(data))))


def _asks_for_models(scope: Scope) -> bool:
    """Returns whether a request is for OpenAI's list of models."""
    is_anthropic = any(name == b"anthropic-version" for name, _ in scope["headers"])
    return scope["method"] == "GET" and scope["path"] == "/v1/models" and not is_anthropic


def _passable(headers: Sequence[tuple[bytes, bytes]]) -> HeaderList:
    return [pair for pair in headers if pair[0] not in BY_THE_HOP and pair[0] != b"x-request-id"]


def _decoded(headers: HeaderList) -> list[tuple[str, str]]:
    return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]


def _last_event(scope: Scope, error: Exception) -> bytes:
    """Returns the final event of a stream that ended with an error."""
    body = get_error_format(scope)(make_fault(error))
    name, end = (b"event: error\n", b"") if body.get("type") == "error" else (b"", DONE)
    return b"\n\n" + name + b"data: " + msgspec.json.encode(body) + b"\n\n" + end
