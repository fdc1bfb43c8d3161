"""The pooled rows behind one HTTP request: its texts checked, computed together, or all aborted.

Knows no wire format.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastapi import Request

from octavo.engine.front.arguments import Prompt
from octavo.engine.front.input_processor import DEFAULT_ORIGIN, Origin
from octavo.outputs import RequestOutput
from octavo.pooling_params import PoolingParams, PoolingTask
from octavo.server.connection import unless_gone
from octavo.server.generation import Generation, member_name
from octavo.server.state.served_model import ServedModel
from octavo.server.turn import in_their_words


@dataclass(frozen=True, slots=True)
class PoolingCall:
    """The texts of one HTTP request, and what is wanted of them."""

    name: str
    prompts: Sequence[Prompt]
    params: PoolingParams
    origin: Origin = DEFAULT_ORIGIN
    task: PoolingTask = "embed"
    field: str = "input"
    """Name that the API has for the texts."""


async def pooled(request: Request, model: ServedModel, call: PoolingCall) -> list[RequestOutput]:
    """Returns the final outputs in the texts' order; a client that goes away ends the work."""
    llm = model.llm
    llm.check_pools(call.task)
    with in_their_words({call.field: "prompt"}):
        model.limits.check(len(call.prompts), call.params)
        prepared = [
            await llm.prepare(member_name(call.name, index), prompt, call.params, call.origin)
            for index, prompt in enumerate(call.prompts)
        ]
    generation = Generation.of_requests(model, prepared, call.params, call.name)
    return await unless_gone(request.receive, generation.results())
