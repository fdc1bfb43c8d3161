"""POST /rerank and /v1/rerank in vLLM's and Jina's format, POST /v2/rerank in Cohere's.

Sources: the three API references.
"""

from __future__ import annotations

import secrets
from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends, Request, Response

from octavo.api.pooling_outputs import ScoringRequestOutput
from octavo.server.http.auth import get_request_context
from octavo.server.http.body import parse_body
from octavo.server.http.errors import use_api_names
from octavo.server.pooling import PooledAnswer, PoolingCall, run_pooling
from octavo.server.pooling_body import PoolingUsage
from octavo.server.scoring.bodies import CohereRerankBody, RerankBody
from octavo.server.state.served_model import ServedModel
from octavo.server.state.service import Service, get_service

PATH = "/rerank"
COHERE_PATH = "/v2/rerank"
WORDS = {"documents": "prompt", "use_activation": "activation"}

router = APIRouter()


class RankedText(msgspec.Struct):
    """The document of a result, if requested."""

    text: str


class RankedEntry(msgspec.Struct):
    """Index and score of a document."""

    index: int
    relevance_score: float
    document: RankedText | msgspec.UnsetType = msgspec.UNSET


class RankedList(msgspec.Struct):
    id: str
    model: str
    usage: PoolingUsage
    results: list[RankedEntry]


@router.post(PATH)
@router.post(f"/v1{PATH}")
async def rerank(
    request: Request,
    service: Annotated[Service, Depends(get_service)],
    body: Annotated[RerankBody, Depends(parse_body(RerankBody))],
) -> Response:
    model = await service.model(body.model)
    name = f"rerank-{secrets.token_hex(12)}"
    answer = await _score(request, model, body, name)
    results = _results(answer.outputs, body, repeats=body.return_documents is not False)
    ranked = RankedList(name, model.name, PoolingUsage.of(answer.num_tokens), results)
    return Response(msgspec.json.encode(ranked), media_type="application/json")


@router.post(COHERE_PATH)
@router.post(f"/cohere{COHERE_PATH}")
async def cohere_rerank(
    request: Request,
    service: Annotated[Service, Depends(get_service)],
    body: Annotated[CohereRerankBody, Depends(parse_body(CohereRerankBody))],
) -> Response:
    name = secrets.token_hex(16)
    answer = await _score(request, await service.model(body.model), body, name)
    response_body = {
        "id": name,
        "results": _results(answer.outputs, body, repeats=body.return_documents is True),
        "meta": {
            "api_version": {"version": "2"},
            "billed_units": {"search_units": 1},
            "tokens": {"input_tokens": answer.num_tokens, "output_tokens": 0},
        },
    }
    return Response(msgspec.json.encode(response_body), media_type="application/json")


async def _score(
    request: Request, model: ServedModel, body: RerankBody | CohereRerankBody, name: str
) -> PooledAnswer[ScoringRequestOutput]:
    """Scores every document against the query."""
    with use_api_names({"max_tokens_per_doc": "max_second_tokens"}):
        job = model.llm.pooling_jobs.scoring(
            body.query, body.texts, body.params, max_second_tokens=body.max_tokens_per_doc
        )
    origin = get_request_context(request, body.priority, body.user)
    return await run_pooling(request, model, PoolingCall(name, job, origin, WORDS))


def _results(
    scored: list[ScoringRequestOutput], body: RerankBody | CohereRerankBody, *, repeats: bool
) -> list[RankedEntry]:
    """Returns the best documents; equal scores keep their order."""
    scores = [output.outputs.score for output in scored]
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    texts = body.texts
    return [
        RankedEntry(index, scores[index], RankedText(texts[index]) if repeats else msgspec.UNSET)
        for index in order[: body.top_n or None]
    ]
