"""POST /classify: label probabilities of texts or text pairs.

Source: vLLM's API reference.
"""

from __future__ import annotations

import secrets
import time
from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends, Request, Response

from octavo.api.pooling_params import TextPair
from octavo.frontend.arguments import PoolingPrompt
from octavo.server.http.auth import get_request_context
from octavo.server.http.body import parse_body
from octavo.server.http.errors import use_api_names
from octavo.server.output_streams import as_prompts
from octavo.server.pooling import PoolingCall, run_pooling
from octavo.server.pooling_body import PoolingUsage
from octavo.server.scoring.bodies import ClassifyBody
from octavo.server.state.service import Service, get_service

PATH = "/classify"
WORDS = {"input": "prompt", "use_activation": "activation"}

router = APIRouter()


class ClassEntry(msgspec.Struct):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassList(msgspec.Struct):
    id: str
    created: int
    model: str
    data: list[ClassEntry]
    usage: PoolingUsage
    object: str = "list"


@router.post(PATH)
async def classify(
    request: Request,
    service: Annotated[Service, Depends(get_service)],
    body: Annotated[ClassifyBody, Depends(parse_body(ClassifyBody))],
) -> Response:
    model = await service.model(body.model)
    name = f"classify-{secrets.token_hex(12)}"
    with use_api_names(WORDS):
        job = model.llm.pooling_jobs.classification(_prompts(body), body.params)
    call = PoolingCall(name, job, get_request_context(request, body.priority, body.user), WORDS)
    answer = await run_pooling(request, model, call)
    class_list = ClassList(
        name,
        int(time.time()),
        model.name,
        [
            ClassEntry(index, class_output.label, class_output.probs, class_output.num_classes)
            for index, class_output in enumerate(output.outputs for output in answer.outputs)
        ],
        PoolingUsage.of(answer.num_tokens),
    )
    return Response(msgspec.json.encode(class_list), media_type="application/json")


def _prompts(body: ClassifyBody) -> list[PoolingPrompt]:
    """Returns the prompts of a body, which holds one or several."""
    if isinstance(body.input, list) and body.input and isinstance(body.input[0], tuple):
        return [TextPair(*pair) for pair in body.input]  # type: ignore[misc]
    return list(as_prompts(body.input))  # type: ignore[arg-type]
