"""POST /v1/embeddings.

Source: OpenAI's API reference; fields that it lacks have vLLM's names.
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Depends, Request, Response

from octavo.api.errors import InvalidRequest
from octavo.api.outputs import RequestOutput
from octavo.api.pooling_outputs import pooled_row
from octavo.api.pooling_params import PoolingParams
from octavo.server.fields import Whole, field, required
from octavo.server.http.auth import get_request_context
from octavo.server.http.body import parse_body
from octavo.server.http.errors import use_api_names
from octavo.server.openai.bodies import TokenId
from octavo.server.output_streams import as_prompts
from octavo.server.pooling import PoolingCall, run_pooling
from octavo.server.pooling_body import PoolingBody, PoolingUsage
from octavo.server.state.service import Service, get_service

PATH = "/v1/embeddings"

router = APIRouter()


class EmbeddingBody(PoolingBody):
    input: str | list[str] | list[TokenId] | list[list[TokenId]] = required(
        "a string, token ids, or a list of either", "input to embed"
    )
    encoding_format: Literal["float", "base64"] = field(
        '"float" or "base64"',
        "encoding of embeddings: numbers, or base64 of little-endian fp32",
        default="float",
    )
    dimensions: Whole | None = field(
        "a dimension that the model declares",
        "number of dimensions to keep",
        rules={"minimum": 1},
    )
    normalize: bool | None = field(
        "true or false", "normalize embeddings to length 1; null: the checkpoint's setting"
    )


class EmbeddingEntry(msgspec.Struct):
    index: int
    embedding: list[float] | str
    object: str = "embedding"


class EmbeddingList(msgspec.Struct):
    id: str
    data: list[EmbeddingEntry]
    model: str
    usage: PoolingUsage
    object: str = "list"


@router.post(PATH)
async def embed(
    request: Request,
    service: Annotated[Service, Depends(get_service)],
    body: Annotated[EmbeddingBody, Depends(parse_body(EmbeddingBody))],
) -> Response:
    model = await service.model(body.model)
    params = PoolingParams(
        dimensions=body.dimensions,
        normalize=body.normalize,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
    )
    name = f"embd-{secrets.token_hex(12)}"
    _check_texts(body.input)
    with use_api_names({"input": "prompt"}):
        job = model.llm.pooling_jobs.embedding(as_prompts(body.input), params)
    call = PoolingCall(name, job, get_request_context(request, body.priority, body.user))
    answer = await run_pooling(request, model, call)
    embedding_list = EmbeddingList(
        name,
        [
            EmbeddingEntry(index, _format(row, body.encoding_format))
            for index, row in enumerate(answer.rows)
        ],
        model.name,
        PoolingUsage.of(answer.num_tokens),
    )
    return Response(msgspec.json.encode(embedding_list), media_type="application/json")


def _check_texts(inputs: str | Sequence[Any]) -> None:
    """Raises InvalidRequest for an empty text, as OpenAI does."""
    texts = [inputs] if isinstance(inputs, str) else inputs
    if "" in texts:
        where = "input" if isinstance(inputs, str) else f"input[{texts.index('')}]"
        raise InvalidRequest(f"{where}: got an empty text, expected some text", param="input")


def _format(output: RequestOutput, form: str) -> list[float] | str:
    """Formats an embedding as numbers or base64."""
    if form == "base64":
        return base64.b64encode(output.pooled or b"").decode()
    return pooled_row(output)
