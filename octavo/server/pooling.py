"""Runs the pooling requests behind one HTTP request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic

from fastapi import Request

from octavo.api.outputs import RequestOutput
from octavo.frontend.input_processor import DEFAULT_CONTEXT, RequestContext
from octavo.frontend.pooling import OutputT, PoolingJob
from octavo.server.http.connection import cancel_on_disconnect
from octavo.server.http.errors import use_api_names
from octavo.server.output_streams import OutputStreams, member_name
from octavo.server.state.served_model import ServedModel


@dataclass(frozen=True, slots=True)
class PoolingCall(Generic[OutputT]):
    """The pooling job of one HTTP request."""

    name: str
    job: PoolingJob[OutputT]
    origin: RequestContext = DEFAULT_CONTEXT
    words: Mapping[str, str] = field(default_factory=lambda: {"input": "prompt"})
    """Names of the API for fields in errors."""


@dataclass(frozen=True, slots=True)
class PooledAnswer(Generic[OutputT]):
    """Outputs of a pooling job."""

    outputs: list[OutputT]
    rows: list[RequestOutput]
    """Final outputs of the engine requests, in the order of the job's prompts."""

    @property
    def num_tokens(self) -> int:
        return sum(len(row.prompt_token_ids) for row in self.rows)


async def run_pooling(
    request: Request, model: ServedModel, call: PoolingCall[OutputT]
) -> PooledAnswer[OutputT]:
    """Runs a job; a disconnect aborts it."""
    llm, job = model.llm, call.job
    with use_api_names(call.words):
        model.limits.check(len(job.prompts), job.params)
        prepared = [
            await llm.prepare_request(
                member_name(call.name, index), prompt, job.params, call.origin
            )
            for index, prompt in enumerate(job.prompts)
        ]
    streams = OutputStreams.of_requests(model, prepared, job.params, call.name)
    rows = await cancel_on_disconnect(request.receive, streams.results())
    return PooledAnswer(job.read(rows), rows)
