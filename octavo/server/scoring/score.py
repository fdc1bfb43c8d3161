"""POST /score and /v1/score: scores of text pairs.

Source: vLLM's API reference.
"""

from __future__ import annotations

import secrets
import time
from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends, Request, Response

from octavo.server.http.auth import origin_of
from octavo.server.http.body import body_of
from octavo.server.http.errors import use_api_names
from octavo.server.pooling import PoolingCall, pooled
from octavo.server.pooling_body import PoolingUsage
from octavo.server.scoring.bodies import ScoreBody
from octavo.server.state.service import Service, service_of

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
    service: Annotated[Service, Depends(service_of)],
    body: Annotated[ScoreBody, Depends(body_of(ScoreBody))],
) -> Response:
    model = await service.model(body.model)
    name = f"score-{secrets.token_hex(12)}"
    first, second = body.names
    with use_api_names({first: "data_1", second: "data_2"}):
        job = model.llm.pooling_jobs.scoring(
            getattr(body, first), getattr(body, second), body.params
        )
    words = {second: "prompt", "use_activation": "activation"}
    call = PoolingCall(name, job, origin_of(request, body.priority, body.user), words)
    answer = await pooled(request, model, call)
    made = ScoreList(
        name,
        int(time.time()),
        model.name,
        [ScoreEntry(index, one.outputs.score) for index, one in enumerate(answer.outputs)],
        PoolingUsage.of(answer.num_tokens),
    )
    return Response(msgspec.json.encode(made), media_type="application/json")
