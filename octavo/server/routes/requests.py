"""GET, PATCH and DELETE /v1/requests/ID, and POST /v1/requests/ID/fork: running requests.

The id is the `id` of a response. Only the key that created it and operators can access it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Request, Response
from pydantic import Field

from octavo.api.errors import EngineDead, InvalidRequest, RequestNotFound
from octavo.frontend.changes import Fork
from octavo.frontend.input_processor import ParentRequest
from octavo.frontend.live_requests import STATES, LiveRequest
from octavo.server.fields import Whole, field
from octavo.server.http.auth import get_owner, get_request_context, is_operator, require_operator
from octavo.server.http.body import Body, parse_body
from octavo.server.http.sse import EventStream
from octavo.server.openai.bodies import (
    SAMPLING_FIELDS,
    CompletionBody,
    SamplingBody,
    TokenId,
)
from octavo.server.openai.chat import ChatFormatter
from octavo.server.openai.completions import CompletionFormatter
from octavo.server.output_parser import OutputParser
from octavo.server.output_streams import OutputStreams, member_name, split_member
from octavo.server.response_builder import ResponseBuilder, send_response
from octavo.server.state.served_model import ServedModel
from octavo.server.state.service import Service, get_service

router = APIRouter()


class ChangeBody(Body):
    is_strict = True

    max_tokens: Annotated[
        int | None,
        Field(description="an integer, from the number of generated tokens to the context limit"),
    ] = None
    priority: Annotated[int | None, Field(description="a 32-bit integer; lower runs first")] = None
    stop: str | list[str] | None = field("a string or a list of strings", "stop before this string")


class ForkBody(SamplingBody):
    """Body of POST /v1/requests/{request_id}/fork. Sampling fields default to those of the parent
    request.
    """

    index: Annotated[int, Field(description="the index of a choice; default 0")] = 0
    keep: Annotated[
        int | None, Field(description="number of tokens of the choice to keep; null: all")
    ] = None
    then: Annotated[
        str | list[TokenId] | None, Field(description="a string or token ids to append")
    ] = None
    logprobs: Whole | None = field(
        "an integer of at least 0",
        "return logprobs of the output tokens",
        ge=0,
    )


@dataclass(frozen=True, slots=True)
class RequestGroup:
    """The engine requests of one HTTP request."""

    name: str
    model: ServedModel
    members: Sequence[LiveRequest]
    """Engine requests in the order of the prompts, without those that ended long ago."""

    @property
    def state(self) -> str:
        return min((one.state for one in self.members), key=STATES.index)


# -- routes ----------------------------------------------------------------------------------------


@router.get("/v1/requests")
async def list_requests(
    request: Request, service: Annotated[Service, Depends(get_service)]
) -> Response:
    """Lists the key's waiting and running requests (all for operators), without texts."""
    if not get_owner(request):
        require_operator(request)  # without named keys, all requests have the same owner
    groups = await _list_visible(request, service, recent=False)
    return _json({"object": "list", "data": [_describe(one) for one in groups]})


@router.get("/v1/requests/{request_id}")
async def show(
    request_id: str, request: Request, service: Annotated[Service, Depends(get_service)]
) -> Response:
    """Shows one waiting, running or recently finished request, with its prompt and text so far."""
    group = await _find(request, service, request_id)
    return _json(_describe(group, texts=True))


@router.delete("/v1/requests/{request_id}")
async def abort(
    request_id: str, request: Request, service: Annotated[Service, Depends(get_service)]
) -> dict[str, Any]:
    """Aborts a request: its stream ends with finish_reason "abort"."""
    group = await _find(request, service, request_id)
    for member in group.members:
        await group.model.llm.abort(member.request_id)
    return {"id": group.name, "object": "request", "aborted": group.state != "finished"}


@router.patch("/v1/requests/{request_id}")
async def change(
    request_id: str,
    request: Request,
    service: Annotated[Service, Depends(get_service)],
    body: Annotated[ChangeBody, Depends(parse_body(ChangeBody))],
) -> Response:
    """Updates max_tokens, priority or stop strings of a waiting or running request."""
    group = await _find(request, service, request_id)
    running = [one for one in group.members if one.state != "finished"]
    for member in running or group.members:
        await group.model.llm.update(
            member.request_id, max_tokens=body.max_tokens, priority=body.priority, stop=body.stop
        )
    return _json(_describe(await _find(request, service, request_id)))


@router.post("/v1/requests/{request_id}/fork")
async def fork(
    request_id: str,
    request: Request,
    service: Annotated[Service, Depends(get_service)],
    body: Annotated[ForkBody, Depends(parse_body(ForkBody))],
) -> Response:
    """Continues a running or recently finished request from a given token, sharing its KV blocks.

    The response has the same format as the parent's.
    """
    group = await _find(request, service, request_id)
    model = await service.model(group.model.name)  # a draining engine accepts no new requests
    body.request_id = body.request_id or secrets.token_hex(12)
    is_completion = request_id.startswith(CompletionFormatter.prefix)
    prefix = CompletionFormatter.prefix if is_completion else ChatFormatter.prefix
    parser = _parser(service.parsers.find(group.name), model, group, body)
    name = f"{prefix}-{body.request_id}"
    forked = _prepare_fork(request, group, body, member_name(name, 0), parser)
    formatter = _formatter(model, forked, body, is_completion=is_completion)
    service.parsers.keep_fork(group.name, name, parser)
    streams = OutputStreams.of_request(model, forked, deltas=bool(body.stream))
    response = ResponseBuilder(streams, forked.sampling_params, parser, formatter.options)
    return await send_response(request, response, formatter, EventStream if body.stream else None)


# -- who may see what ------------------------------------------------------------------------------


async def _list_visible(request: Request, service: Service, *, recent: bool) -> list[RequestGroup]:
    """Returns the requests visible to the key, oldest first."""
    owner, sees_all = get_owner(request), is_operator(request)
    groups = []
    for model in service.ready_models():
        by_name: dict[str, list[LiveRequest]] = {}
        for one in await _list_requests(model, recent=recent):
            if sees_all or one.owner == owner:
                by_name.setdefault(split_member(one.request_id)[0], []).append(one)
        groups += [RequestGroup(name, model, members) for name, members in by_name.items()]
    return groups


async def _list_requests(model: ServedModel, *, recent: bool) -> list[LiveRequest]:
    """Returns a model's requests; none if its engine has ended, so that other models are still
    listed.
    """
    try:
        return await model.llm.requests(recent=recent)
    except EngineDead:
        return []


async def _find(request: Request, service: Service, request_id: str) -> RequestGroup:
    """Returns a request by its public id; raises RequestNotFound also if the key may not see it."""
    for group in await _list_visible(request, service, recent=True):
        if group.name == request_id:
            return group
    raise RequestNotFound(
        f"no request {request_id!r}",
        hint="a request is visible to the API key that sent it, until a minute after it ends",
    )


# -- forks -----------------------------------------------------------------------------------------


def _parser(
    parser: OutputParser, model: ServedModel, group: RequestGroup, body: ForkBody
) -> OutputParser:
    """Returns the parser of a fork. Its response excludes the kept tokens, unless the fork starts
    inside a tool call.
    """
    if parser.form is None or model.tokenizer is None:
        return parser
    member, index = _member(group, body.index)
    kept_token_ids = member.samples[index].token_ids[: body.keep]
    then = body.then or []
    if isinstance(then, str):
        then = model.tokenizer.encode(then, add_special_tokens=False)
    return parser.after(model.tokenizer, [*kept_token_ids, *then])


def _prepare_fork(
    request: Request, group: RequestGroup, body: ForkBody, name: str, parser: OutputParser
) -> ParentRequest:
    """Checks a fork against its parent request."""
    if body.use_beam_search or body.beam_width is not None:
        raise InvalidRequest("use_beam_search: not supported for a fork", param="use_beam_search")
    if body.cache_salt is not None:
        raise InvalidRequest("cache_salt: a fork uses that of its request", param="cache_salt")
    member, index = _member(group, body.index)
    changes = {
        changed: value
        for changed in (*SAMPLING_FIELDS, "max_tokens", "logprobs")
        if (value := getattr(body, changed)) is not None
    }
    if parser.marks is not None:
        changes["answer_marks"] = parser.marks
    priority = member.priority if body.priority is None else body.priority
    return group.model.llm.prepare_fork(
        member.request_id,
        Fork(
            name,
            index=index,
            keep=body.keep,
            then=body.then or (),
            changes=changes,
            origin=get_request_context(request, priority, body.user or member.tenant),
        ),
    )


def _member(group: RequestGroup, index: int) -> tuple[LiveRequest, int]:
    """Returns the request and the sample of a choice."""
    num_samples = group.members[0].params.n
    prompt_index, sample_index = divmod(index, num_samples)
    for member in group.members:
        if split_member(member.request_id)[1] == prompt_index:
            return member, sample_index
    raise InvalidRequest(
        f"index: got {index}, expected the indices of the request's choices, as"
        f" GET /v1/requests/{group.name} lists them",
        param="index",
    )


def _formatter(
    model: ServedModel, forked: ParentRequest, body: ForkBody, *, is_completion: bool
) -> ChatFormatter | CompletionFormatter:
    params = forked.sampling_params
    if not is_completion:
        return ChatFormatter(body, params, model)
    fields = {name: getattr(body, name) for name in SamplingBody.model_fields}
    plain = CompletionBody.model_construct(**fields, prompt=[], logprobs=params.logprobs)
    return CompletionFormatter(plain, params, model)


# -- what is shown ---------------------------------------------------------------------------------


def _describe(group: RequestGroup, *, texts: bool = False) -> dict[str, Any]:
    """Describes a request as JSON; `texts` includes prompts and outputs."""
    first = min(group.members, key=lambda one: STATES.index(one.state))
    shown: dict[str, Any] = {
        "id": group.name,
        "object": "request",
        "model": group.model.name,
        "state": first.state,
        "waits_for": first.waits_for,
        "waited_s": round(first.waited_s, 4),
        "waits": {reason: round(seconds, 4) for reason, seconds in first.waits.items()},
        "age_s": round(time.monotonic() - first.arrival_time, 4),
        "prompt_tokens": sum(len(one.prompt_token_ids) for one in group.members),
        "cached_tokens": sum(one.num_cached_tokens for one in group.members),
        "tokens": sum(len(sample.token_ids) for one in group.members for sample in one.samples),
        "max_tokens": first.params.max_tokens,
        "stop": first.params.stop_strings,
        "priority": first.priority,
        "preemptions": sum(one.num_preemptions for one in group.members),
        "owner": first.owner,
        "user": first.tenant,
        "choices": [choice for one in group.members for choice in _choices(one, texts=texts)],
    }
    if texts:
        shown["prompts"] = [
            {"text": one.prompt, "token_ids": one.prompt_token_ids} for one in group.members
        ]
    return shown


def _choices(member: LiveRequest, *, texts: bool) -> list[dict[str, Any]]:
    first = split_member(member.request_id)[1] * member.params.n
    choices = []
    for sample in member.samples:
        choice = {
            "index": first + sample.index,
            "state": sample.state,
            "tokens": len(sample.token_ids),
            "computed_tokens": sample.num_computed_tokens,
            "blocks": sample.num_blocks,
            "finish_reason": sample.finish_reason,
        }
        if texts:
            choice |= {"text": sample.text, "token_ids": sample.token_ids}
        choices.append(choice)
    return choices


def _json(content: Any) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
