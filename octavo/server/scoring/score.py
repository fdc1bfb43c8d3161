"""POST /score and /v1/score: scores of text pairs.

Source: vLLM's API reference.
"""

from __future__ import annotations

import secrets
import time
from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends, Request, Response

from octavo.server.http.auth import get_request_context
from octavo.server.http.body import parse_body
from octavo.server.http.errors import use_api_names
from octavo.server.pooling import PoolingCall, run_pooling
from octavo.server.pooling_body import PoolingUsage
from octavo.server.scoring.bodies import ScoreBody
from octavo.server.state.service import Service, get_service

PATH = "/score"

router = APIRouter()


class ScoreEntry(msgspec.Struct):
    index: int
    score: float
    object: str = "score"


class ScoreList(msgspec.Struct):
    id: str
    created: int
    model: str
    data: list[ScoreEntry]
    usage: PoolingUsage
    object: str = "list"


@router.post(PATH)
@router.post(f"/v1{PATH}")
async def score(
    request: Request,
    service: Annotated[Service, Depends(get_service)],
    body: Annotated[ScoreBody, Depends(parse_body(ScoreBody))],
) -> Response:
    model = await service.model(body.model)
    name = f"score-{secrets.token_hex(12)}"
    first, second = body.names
    with use_api_names({first: "data_1", second: "data_2"}):
        job = model.llm.pooling_jobs.scoring(
            getattr(body, first), getattr(body, second), body.params
        )
    words = {second: "prompt", "use_activation": "activation"}
    call = PoolingCall(name, job, get_request_context(request, body.priority, body.user), words)
    answer = await run_pooling(request, model, call)
    score_list = ScoreList(
        name,
        int(time.time()),
        model.name,
        [ScoreEntry(index, one.outputs.score) for index, one in enumerate(answer.outputs)],
        PoolingUsage.of(answer.num_tokens),
    )
    return Response(msgspec.json.encode(score_list), media_type="application/json")
