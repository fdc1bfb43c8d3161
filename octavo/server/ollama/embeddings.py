"""POST /api/embed and POST /api/embeddings.

Source: Ollama's API reference. Embeddings of /api/embed are normalized, those of the older
/api/embeddings are as the checkpoint defines them.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request

from octavo.api.outputs import RequestOutput
from octavo.api.pooling_outputs import pooled_row
from octavo.api.pooling_params import MODEL_LIMIT, PoolingParams
from octavo.server.fields import Whole, accepted, field, required
from octavo.server.http.auth import get_request_context
from octavo.server.http.body import Body, parse_body
from octavo.server.ollama.bodies import RunOptions
from octavo.server.ollama.formatter import NANOSECONDS
from octavo.server.ollama.keep_alive import TAKES, KeepAlive, apply_keep_alive
from octavo.server.ollama.names import known_name
from octavo.server.pooling import PoolingCall, run_pooling
from octavo.server.state.service import Service, get_service

router = APIRouter()


class OllamaPoolingBody(Body):
    """Base class of embedding bodies."""

    stream_type = None

    model: str = required("the name of a model, with or without :latest", "model to use")
    options: RunOptions | None = accepted("an object of Ollama options")
    keep_alive: KeepAlive = field(
        TAKES, "time to keep the model loaded after the request; operator only"
    )


class OllamaEmbedBody(OllamaPoolingBody):
    input: str | list[str] = required("a string, or a list of strings", "input to embed")
    truncate: bool | None = field(
        "true or false; null: true",
        "truncate an input that is too long instead of rejecting it",
    )
    dimensions: Whole | None = field(
        "a dimension that the model declares",
        "number of dimensions to keep",
        rules={"minimum": 1},
    )


class OllamaEmbeddingsBody(OllamaPoolingBody):
    prompt: str = required("a string", "input to embed")


@router.post("/api/embed")
async def embed(
    request: Request,
    service: Annotated[Service, Depends(get_service)],
    body: Annotated[OllamaEmbedBody, Depends(parse_body(OllamaEmbedBody))],
) -> dict[str, Any]:
    began = time.monotonic_ns()
    texts = [body.input] if isinstance(body.input, str) else body.input
    params = PoolingParams(
        dimensions=body.dimensions,
        normalize=True,
        truncate_prompt_tokens=None if body.truncate is False else MODEL_LIMIT,
    )
    outputs, load_s = await _outputs(request, service, body, texts, params)
    return {
        "model": body.model,
        "embeddings": list(map(pooled_row, outputs)),
        "total_duration": time.monotonic_ns() - began,
        "load_duration": round(load_s * NANOSECONDS),
        "prompt_eval_count": sum(len(output.prompt_token_ids) for output in outputs),
    }


@router.post("/api/embeddings")
async def embed_one(
    request: Request,
    service: Annotated[Service, Depends(get_service)],
    body: Annotated[OllamaEmbeddingsBody, Depends(parse_body(OllamaEmbeddingsBody))],
) -> dict[str, Any]:
    params = PoolingParams(truncate_prompt_tokens=MODEL_LIMIT)
    (output,), _ = await _outputs(request, service, body, [body.prompt], params)
    return {"embedding": pooled_row(output)}


async def _outputs(
    request: Request,
    service: Service,
    body: OllamaPoolingBody,
    texts: Sequence[str],
    params: PoolingParams,
) -> tuple[list[RequestOutput], float]:
    """Returns the outputs of texts, and the model's load time in seconds."""
    name = f"ollama-{secrets.token_hex(12)}"
    origin = get_request_context(request, None, None)
    model = await service.model(known_name(service, body.model))
    apply_keep_alive(request, model.uses, body.keep_alive)
    words = {"input": "prompt"} if isinstance(body, OllamaEmbedBody) else {}
    call = PoolingCall(name, model.llm.pooling_jobs.embedding(texts, params), origin, words)
    return (await run_pooling(request, model, call)).rows, model.load_s
