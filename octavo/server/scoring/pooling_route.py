"""POST /pooling: the pooled row of each text, or a row for each of its tokens.

Source: vLLM's API reference.
"""

from __future__ import annotations

import base64
import secrets
import time
from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Depends, Request, Response

from octavo.api.outputs import RequestOutput
from octavo.api.pooling_outputs import PoolingRequestOutput
from octavo.api.pooling_params import PoolingParams
from octavo.server.fields import field
from octavo.server.http.auth import get_request_context
from octavo.server.http.body import parse_body
from octavo.server.http.errors import use_api_names
from octavo.server.openai.embeddings import EmbeddingBody
from octavo.server.output_streams import as_prompts
from octavo.server.pooling import PoolingCall, run_pooling
from octavo.server.pooling_body import PoolingUsage
from octavo.server.state.service import Service, get_service

PATH = "/pooling"
WORDS = {"input": "prompt", "use_activation": "activation"}

router = APIRouter()


class PoolBody(EmbeddingBody):
    use_activation: bool | None = field(
        "true or false",
        "apply the classifier's activation to the scores; null: the checkpoint's setting",
    )

    @property
    def params(self) -> PoolingParams:
        return PoolingParams(
            dimensions=self.dimensions,
            normalize=self.normalize,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            activation="none" if self.use_activation is False else None,
        )


class PooledEntry(msgspec.Struct):
    index: int
    data: list[float] | list[list[float]] | str
    object: str = "pooling"


class PooledList(msgspec.Struct):
    id: str
    created: int
    model: str
    data: list[PooledEntry]
    usage: PoolingUsage
    object: str = "list"


@router.post(PATH)
async def pool(
    request: Request,
    service: Annotated[Service, Depends(get_service)],
    body: Annotated[PoolBody, Depends(parse_body(PoolBody))],
) -> Response:
    model = await service.model(body.model)
    name = f"pool-{secrets.token_hex(12)}"
    with use_api_names(WORDS):
        job = model.llm.pooling_jobs.pooling(as_prompts(body.input), body.params)
    call = PoolingCall(name, job, get_request_context(request, body.priority, body.user), WORDS)
    answer = await run_pooling(request, model, call)
    pairs = zip(answer.outputs, answer.rows, strict=True)
    pooled_list = PooledList(
        name,
        int(time.time()),
        model.name,
        [
            PooledEntry(index, _format(output, row, body.encoding_format))
            for index, (output, row) in enumerate(pairs)
        ],
        PoolingUsage.of(answer.num_tokens),
    )
    return Response(msgspec.json.encode(pooled_list), media_type="application/json")


def _format(
    output: PoolingRequestOutput, row: RequestOutput, form: Literal["float", "base64"]
) -> list[float] | list[list[float]] | str:
    """Formats a row, or the rows of all tokens, as numbers or base64."""
    return base64.b64encode(row.pooled or b"").decode() if form == "base64" else output.outputs.data
