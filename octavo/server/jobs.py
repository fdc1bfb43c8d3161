"""POST /generate answers at once with a request id; GET /result/ID says how far it is or gives the
result; DELETE forgets it.

Owns the jobs: at most `max_jobs` of them, finished ones for `job_ttl_s` seconds. The oldest
finished one makes room for a new one; where all still run, a new one is refused.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Request
from pydantic import Field
from starlette.exceptions import HTTPException

from octavo.async_llm import AsyncLLM
from octavo.engine.front.input_processor import Origin
from octavo.errors import InvalidRequest, OctavoError, Overloaded
from octavo.outputs import RequestOutput
from octavo.sampling_params import SamplingParams
from octavo.server.auth import tenant_of
from octavo.server.body import body_of
from octavo.server.errors import error_body
from octavo.server.generation import Generation, prompt_of
from octavo.server.openai.answer import timings_of, usage_of
from octavo.server.openai.protocol import SamplingBody
from octavo.server.openai.sampling import sampling_params
from octavo.server.service import Service, service_of

router = APIRouter()


class GenerateBody(SamplingBody):
    prompt: Annotated[str | list[int], Field(description="a text or a list of token ids")]


@dataclass(slots=True)
class Job:
    """One request. `finished_at` is on the monotonic clock."""

    request_id: str
    wants_timings: bool = False
    task: asyncio.Task[None] | None = None
    latest: RequestOutput | None = None
    error: OctavoError | None = None
    finished_at: float | None = None

    @property
    def state(self) -> str:
        if self.error is not None:
            return "failed"
        if self.finished_at is not None:
            return "finished"
        return "waiting" if self.latest is None else "running"


class Jobs:
    """By request id, oldest first."""

    def __init__(self, *, max_jobs: int, ttl_s: float) -> None:
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        self._max_jobs = max_jobs
        self._ttl_s = ttl_s

    def start(self, generation: Generation, request_id: str, *, wants_timings: bool) -> Job:
        job = self._jobs[request_id] = Job(request_id, wants_timings)
        self._jobs.move_to_end(request_id)  # it may be the name of one that has finished
        job.task = asyncio.create_task(_follow(job, generation))
        return job

    def make_room(self) -> None:
        """For one more; Overloaded where every job still runs."""
        self._sweep()
        if len(self._jobs) < self._max_jobs:
            return
        oldest = next((job for job in self._jobs.values() if job.finished_at is not None), None)
        if oldest is None:
            raise Overloaded(
                f"{len(self._jobs)} jobs are running, allowed are {self._max_jobs}",
                hint="try again later, or raise max_jobs",
            )
        del self._jobs[oldest.request_id]

    def find(self, request_id: str) -> Job:
        self._sweep()
        job = self._jobs.get(request_id)
        if job is None:
            raise HTTPException(
                404,
                f"no job {request_id!r}: unknown, or finished more than {self._ttl_s:g}"
                " seconds ago",
            )
        return job

    def forget(self, request_id: str) -> None:
        """Aborts it where it still runs."""
        job = self.find(request_id)
        if job.task is not None:
            job.task.cancel()
        del self._jobs[request_id]

    def _sweep(self) -> None:
        oldest_kept = time.monotonic() - self._ttl_s
        for job in [
            job
            for job in self._jobs.values()
            if job.finished_at is not None and job.finished_at < oldest_kept
        ]:
            del self._jobs[job.request_id]


@router.post("/generate", status_code=202)
async def generate(
    request: Request,
    service: Annotated[Service, Depends(service_of)],
    body: Annotated[GenerateBody, Depends(body_of(GenerateBody))],
) -> dict[str, str]:
    service.check_model(body.model)
    llm = service.slot.llm
    params = _params(body, llm)
    service.jobs.make_room()
    prompt = await prompt_of(llm, body.prompt, cache_salt=body.cache_salt)
    request_id = body.request_id or f"job-{secrets.token_hex(12)}"
    origin = Origin(body.priority or 0, tenant_of(request, body.user))
    generation = Generation(llm, service.metrics, [prompt], params, request_id, origin=origin)
    job = service.jobs.start(generation, request_id, wants_timings=body.timings)
    return {"request_id": job.request_id, "state": job.state}


@router.get("/result/{request_id}")
async def result(
    request_id: str, service: Annotated[Service, Depends(service_of)]
) -> dict[str, Any]:
    return _report(service.jobs.find(request_id))


@router.delete("/result/{request_id}")
async def forget(
    request_id: str, service: Annotated[Service, Depends(service_of)]
) -> dict[str, str]:
    service.jobs.forget(request_id)
    return {"request_id": request_id, "state": "forgotten"}


async def _follow(job: Job, generation: Generation) -> None:
    """Keeps the latest look at the answer. A failure stays with the job."""
    try:
        async for _, output in generation.outputs():
            job.latest = output
    except OctavoError as error:
        job.error = error
    finally:
        job.finished_at = time.monotonic()


def _report(job: Job) -> dict[str, Any]:
    report: dict[str, Any] = {"request_id": job.request_id, "state": job.state}
    if job.error is not None:
        return report | error_body(job.error)
    if job.latest is None:
        return report
    samples = [
        {
            "index": sample.index,
            "text": sample.text,
            "token_ids": sample.token_ids,
            "finish_reason": sample.finish_reason,
        }
        for sample in job.latest.outputs
    ]
    usage = usage_of([job.latest])
    report |= {
        "outputs": samples,
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
        },
    }
    timings = timings_of([job.latest]) if job.wants_timings else msgspec.UNSET
    return (
        report if timings is msgspec.UNSET else report | {"timings": msgspec.to_builtins(timings)}
    )


def _params(body: GenerateBody, llm: AsyncLLM) -> SamplingParams:
    if body.stream:
        raise InvalidRequest(
            "stream: a job has none",
            hint="ask for its result, or use /v1/completions",
            param="stream",
        )
    max_tokens = 16 if body.max_tokens is None else body.max_tokens
    return sampling_params(
        body, llm.get_default_sampling_params(), max_tokens=max_tokens, logprobs=None
    )
