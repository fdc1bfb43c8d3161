"""POST /generate, GET /result/ID and DELETE /result/ID: asynchronous jobs.

Only the key that created a job can access it. The jobs are in `state/jobs.py`.
"""

from __future__ import annotations

import secrets
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Request
from pydantic import Field

from octavo.api.async_llm import AsyncLLM
from octavo.api.errors import InvalidRequest
from octavo.api.sampling_params import SamplingParams
from octavo.server.http.auth import get_owner, get_request_context
from octavo.server.http.body import parse_body
from octavo.server.http.errors import error_body
from octavo.server.openai.bodies import SamplingBody, TokenId
from octavo.server.openai.formatter import format_timings
from octavo.server.openai.sampling import sampling_params
from octavo.server.output_streams import OutputStreams, make_prompt
from octavo.server.response_builder import TokenUsage
from octavo.server.state.jobs import Job
from octavo.server.state.service import Service, get_service

DEFAULT_MAX_TOKENS = 16

router = APIRouter()


class GenerateBody(SamplingBody):
    stream_type = None

    prompt: Annotated[str | list[TokenId], Field(description="a string or a list of token ids")]


@router.post("/generate", status_code=202)
async def generate(
    request: Request,
    service: Annotated[Service, Depends(get_service)],
    body: Annotated[GenerateBody, Depends(parse_body(GenerateBody))],
) -> dict[str, str]:
    """Starts a job and returns its request id."""
    model = await service.model(body.model)
    llm = model.llm
    params = _params(body, llm)
    prompt = await make_prompt(llm, body.prompt, cache_salt=body.cache_salt)
    request_id = body.request_id or f"job-{secrets.token_hex(12)}"
    origin = get_request_context(request, body.priority, body.user)
    await llm.check_grammar(params)
    service.jobs.make_room()  # after the last await: earlier room may be taken by now
    streams = OutputStreams(model, [prompt], params, request_id, origin=origin)
    job = service.jobs.start(streams, request_id, get_owner(request), wants_timings=body.timings)
    return {"request_id": job.request_id, "state": job.state}


@router.get("/result/{request_id}")
async def result(
    request_id: str, request: Request, service: Annotated[Service, Depends(get_service)]
) -> dict[str, Any]:
    """Reports a job's state and its output so far."""
    return _report(service.jobs.find(request_id, get_owner(request)))


@router.delete("/result/{request_id}")
async def forget(
    request_id: str, request: Request, service: Annotated[Service, Depends(get_service)]
) -> dict[str, str]:
    """Removes a job; aborts it if it is running."""
    service.jobs.discard(request_id, get_owner(request))
    return {"request_id": request_id, "state": "forgotten"}


def _report(job: Job) -> dict[str, Any]:
    report: dict[str, Any] = {"request_id": job.request_id, "state": job.state}
    if job.error is not None:
        return report | error_body(job.error)
    if job.latest is None:
        return report
    report["outputs"] = [
        {
            "index": sample.index,
            "text": sample.text,
            "token_ids": sample.token_ids,
            "finish_reason": sample.finish_reason,
        }
        for sample in job.latest.outputs
    ]
    usage = TokenUsage.of([job.latest])
    report["usage"] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
    }
    timings = format_timings(job.latest.timings) if job.wants_timings else msgspec.UNSET
    if timings is not msgspec.UNSET:
        report["timings"] = msgspec.to_builtins(timings)
    return report


def _params(body: GenerateBody, llm: AsyncLLM) -> SamplingParams:
    if body.stream:
        raise InvalidRequest(
            "stream: not supported for jobs",
            hint="fetch its result, or use /v1/completions",
            param="stream",
        )
    if body.return_prompt_text:
        raise InvalidRequest(
            "return_prompt_text: not supported for jobs", param="return_prompt_text"
        )
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    return sampling_params(
        body, llm.get_default_sampling_params(), max_tokens=max_tokens, logprobs=None
    )
