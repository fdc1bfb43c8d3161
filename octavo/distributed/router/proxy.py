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
from octavo.distributed.router.prompts import ParsedRequest, PromptReader
from octavo.distributed.router.settings import RouterSettings
from octavo.distributed.router.upstream import (
    HeaderList,
    UpstreamLost,
    UpstreamRequest,
    UpstreamResponse,
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


class ServerChoice(Enum):
    """How the server of a request is selected.

    Paths that are not in the table are not forwarded; clients must send them to a server directly.
    """

    POLICY = auto()
    """Chosen by the routing policy, for generation and pooling requests."""
    ANY = auto()
    """Any healthy server; all give the same response."""
    OWNER = auto()
    """The server that stores the client's files and batches."""
    RESPONSE = auto()
    """The server that has the stored response in the path."""


@dataclass(frozen=True, slots=True)
class ForwardedRoute:
    """A forwarded route."""

    methods: frozenset[str]
    pattern: re.Pattern[str]
    choice: ServerChoice


def _row(methods: str, pattern: str, choice: ServerChoice) -> ForwardedRoute:
    return ForwardedRoute(frozenset(methods.split()), re.compile(pattern), choice)


TABLE = (
    _row(
        "POST",
        r"/v1/(chat/completions|completions|embeddings|messages(/count_tokens)?|responses|rerank"
        r"|score|classify)",
        ServerChoice.POLICY,
    ),
    _row("POST", r"(/cohere)?/v2/chat|/api/(chat|generate|embed|embeddings)", ServerChoice.POLICY),
    _row("POST", r"(/v1)?/(tokenize|detokenize|apply-template)", ServerChoice.ANY),
    _row("GET", r"/v1/models(/.+)?|/v1/capabilities|(/v1)?/tokenizer_info", ServerChoice.ANY),
    _row("GET", r"/api/(version|tags|ps)|/version", ServerChoice.ANY),
    _row("POST", r"/api/show", ServerChoice.ANY),
    _row("GET POST DELETE", r"/v1/(files|batches)(/.*)?", ServerChoice.OWNER),
    _row("GET POST DELETE", r"/v1/responses/[^/]+(/[a-z_]+)?", ServerChoice.RESPONSE),
)


def get_server_choice(method: str, path: str) -> ServerChoice | None:
    """Returns how the server of a request is selected; None if the path is not forwarded, for
    example because it contains "..".
    """
    if not {".", ".."}.isdisjoint(path.split("/")):
        return None
    for row in TABLE:
        if method in row.methods and row.pattern.fullmatch(path):
            return row.choice
    return None


SERVER_HEADER = b"x-octavo-server"
"""Response header that contains the server's number."""
HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer"
    b" transfer-encoding upgrade host content-length expect date server".split()
)
"""Headers that concern a single connection and are not forwarded."""
RETRIED_STATUSES = frozenset({429, 503})
"""Statuses after which another server is tried."""
CACHED_TOKENS = re.compile(rb'"cached_tokens": ?(\d+)')
NO_JOB = RoutingJob(0)
SERVER_GONE = Unavailable(
    "the server that computed this response is gone", hint="send the request again"
)


@dataclass(slots=True)
class ForwardedRequest:
    """A request with all the data needed to send it, possibly several times."""

    choice: ServerChoice
    upstream: UpstreamRequest
    parsed: ParsedRequest
    sender: bytes
    """The client's API key header; b"" without one."""


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
        self._reader = PromptReader(members, needs_hashes=placer.needs_hashes)
        self._settings = settings
        self._server_settings = settings.server
        self._counts = counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            request = await self._read(scope, receive)
            cards = self._members.merge_model_lists() if _is_model_list(scope) else None
            if cards is not None:
                body = msgspec.json.encode({"object": "list", "data": cards})
                await Response(body, media_type="application/json")(scope, receive, send)
                return
            with suppress(ClientDisconnect):
                await cancel_on_disconnect(receive, self._forward(request, scope, receive, send))
        except (HTTPException, Unavailable) as error:
            self._counts.add("refusals", str(make_fault(error).status))
            await error_response(error, get_error_format(scope))(scope, receive, send)

    async def _read(self, scope: Scope, receive: Receive) -> ForwardedRequest:
        """Reads a complete request; raises an error if the router rejects it."""
        path = scope["path"]
        choice = get_server_choice(scope["method"], path)
        if choice is None:
            raise HTTPException(
                404,
                f"{scope['method']} {path} is not passed on (hint: ask the server itself)",
            )
        if self._members.is_stopping:
            raise Unavailable("the router is stopping")
        request = Request(scope, receive)
        body = await read_in_time(request, self._server_settings)
        sender = next(
            (v for k, v in scope["headers"] if k in (b"authorization", b"x-api-key")), b""
        )
        asked = ParsedRequest(NO_JOB)
        if choice is ServerChoice.POLICY:
            asked = await self._reader.read(path, body, sender)
        elif choice is ServerChoice.ANY:
            asked = ParsedRequest(NO_JOB, self._reader.get_model(path, body))
        elif choice is ServerChoice.RESPONSE:
            asked = ParsedRequest(NO_JOB, response_id=path.split("/")[3])
        target = (scope.get("raw_path") or path.encode()).decode("latin-1")
        if scope["query_string"]:
            target += "?" + scope["query_string"].decode("latin-1")
        upstream = UpstreamRequest(scope["method"], target, self._headers(scope), body)
        return ForwardedRequest(choice, upstream, asked, sender)

    def _headers(self, scope: Scope) -> HeaderList:
        """Returns the headers for the server: the client's, with its address, the request id, and
        the servers' API key.
        """
        key = self._settings.server_api_key
        dropped = HOP_BY_HOP | {ID_HEADER.lower().encode(), b"x-forwarded-for"}
        if key is not None:
            dropped |= {b"authorization", b"x-api-key"}
        forwarded = [pair for pair in scope["headers"] if pair[0] not in dropped]
        if key is not None:
            forwarded.append((b"authorization", b"Bearer " + key.encode()))
        if scope.get("client"):
            before = [v for k, v in scope["headers"] if k == b"x-forwarded-for"]
            address = b", ".join([*before, scope["client"][0].encode()])
            forwarded.append((b"x-forwarded-for", address))
        forwarded.append((ID_HEADER.lower().encode(), get_record(scope).request_id.encode()))
        return forwarded

    async def _forward(
        self, request: ForwardedRequest, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Tries one server after another until one has begun to respond."""
        tried: set[int] = set()
        error_response: Response | None = None
        while len(tried) < self._settings.max_attempts:
            placement = await self._place(request, tried)
            if placement is None:
                break
            tried.add(placement.index)
            member = placement.member
            try:
                answer = await member.client.send(request.upstream)
                if answer.status in RETRIED_STATUSES and request.choice in (
                    ServerChoice.POLICY,
                    ServerChoice.ANY,
                ):
                    error_response = await self._read_error(answer, placement)
                    continue
                try:
                    await self._stream(answer, placement, scope, send)
                finally:
                    member.client.finish(answer)
                return
            except UpstreamLost as error:
                member.record_failure(str(error))
                member.target.cached.clear()
                self._counts.add("retries", str(placement.index), "lost")
            finally:
                placement.end()
        if error_response is None:
            trouble = self._members.describe_trouble(request.parsed.model)
            raise Unavailable(
                f"no server can process the request:"
                f" {trouble or 'no server has this model or object'}",
                hint="try again in a few seconds",
            )
        await error_response(scope, receive, send)

    async def _place(self, request: ForwardedRequest, tried: set[int]) -> PlacedRequest | None:
        """Returns the next server for a request; None if there are no more."""
        job = request.parsed.job
        response_id = request.parsed.response_id
        if request.choice is ServerChoice.POLICY and response_id is None:
            placement = self._placer.place(job, request.parsed.model, tried)
            if placement is not None and not tried:
                self._counts.add("prompt_tokens", by=job.num_tokens)
                self._counts.add("predicted_cached_tokens", by=placement.num_cached)
            return placement
        if request.choice is ServerChoice.ANY:
            index = self._placer.get_least_busy(tried, request.parsed.model)
        elif tried:
            return None
        elif request.choice is ServerChoice.OWNER:
            index = self._placer.get_owner_server(request.sender)
        else:
            assert response_id is not None, "it is in the path or the body"
            index = await self._placer.find_stored_response(response_id, request.upstream.headers)
            if index is None:
                index = self._placer.get_least_busy(tried)  # it reports that it does not exist
        return None if index is None else self._placer.assign(index, job)

    async def _read_error(self, answer: UpstreamResponse, placement: PlacedRequest) -> Response:
        """Returns the error response of a server, in case no other server succeeds."""
        member = placement.member
        try:
            body = await answer.read_all()
        finally:
            member.client.finish(answer)
        self._counts.add("retries", str(placement.index), str(answer.status))
        headers = dict(_decode(_get_forwarded_headers(answer.headers)))
        return Response(body, answer.status, headers)

    async def _stream(
        self, answer: UpstreamResponse, placement: PlacedRequest, scope: Scope, send: Send
    ) -> None:
        """Streams a response to the client."""
        number = str(placement.index)
        self._counts.add("requests", number, str(answer.status))
        headers = [*_get_forwarded_headers(answer.headers), (SERVER_HEADER, number.encode())]
        length = answer.header(b"content-length")
        if length:
            headers.append((b"content-length", length))
        is_stream = answer.header(b"content-type").startswith(b"text/event-stream")
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        deadline = scope.get(DEADLINE, Deadline())
        try:
            async with asyncio.timeout_at(deadline.at_s) as limit:
                while data := await answer.read():
                    if is_stream:
                        placement.record_tokens(data.count(b"data:"))
                    self._note_cached(data)
                    await send({"type": "http.response.body", "body": data, "more_body": True})
        except (UpstreamLost, TimeoutError) as error:
            fault: Exception = SERVER_GONE
            if limit.expired():
                fault = deadline.error
            else:
                placement.member.record_failure(str(error))
                self._counts.add("broken_answers", number)
            if not is_stream:
                return  # closing the connection early lets clients notice the incomplete response
            part = _last_event(scope, fault)
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _note_cached(self, data: bytes) -> None:
        """Counts the cached tokens that a response reports, if a single chunk contains the
        number.
        """
        if b"cached_tokens" in data:
            self._counts.add("found_cached_tokens", by=sum(map(int, CACHED_TOKENS.findall(data))))


def _is_model_list(scope: Scope) -> bool:
    """Returns whether a request is for OpenAI's list of models."""
    is_anthropic = any(name == b"anthropic-version" for name, _ in scope["headers"])
    return scope["method"] == "GET" and scope["path"] == "/v1/models" and not is_anthropic


def _get_forwarded_headers(headers: Sequence[tuple[bytes, bytes]]) -> HeaderList:
    return [pair for pair in headers if pair[0] not in HOP_BY_HOP and pair[0] != b"x-request-id"]


def _decode(headers: HeaderList) -> list[tuple[str, str]]:
    return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]


def _last_event(scope: Scope, error: Exception) -> bytes:
    """Returns the final event of a stream that ended with an error."""
    body = get_error_format(scope)(make_fault(error))
    name, end = (b"event: error\n", b"") if body.get("type") == "error" else (b"", DONE)
    return b"\n\n" + name + b"data: " + msgspec.json.encode(body) + b"\n\n" + end
