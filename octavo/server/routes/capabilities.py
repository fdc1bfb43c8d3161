"""GET /v1/capabilities: request fields of a loaded model, generated from their declarations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Query, Request

from octavo.api.pooling_params import PoolingTask
from octavo.api.sampling_options import STRUCTURED_OUTPUT_VALUES
from octavo.api.sampling_params import OPTIONS
from octavo.config.config_hooks import store_option
from octavo.config.engine_config import EngineConfig
from octavo.engine.protocol.kv_events import offset_endpoint, parse_events_config
from octavo.executor.kv import BLOCK_SIZE
from octavo.server.fields import describe_fields
from octavo.server.http.body import Body
from octavo.server.openai import chat, completions, embeddings
from octavo.server.openai.bodies import SAMPLING_FIELDS, ChatBody, CompletionBody
from octavo.server.scoring import classify, pooling_route, rerank, score
from octavo.server.scoring.bodies import ClassifyBody, CohereRerankBody, RerankBody, ScoreBody
from octavo.server.state.served_model import ServedModel
from octavo.server.state.service import Service, get_service

BODIES: dict[str, type[Body]] = {
    chat.PATH: ChatBody,
    completions.PATH: CompletionBody,
}
SHARED_BODIES: dict[str, type[Body]] = {
    pooling_route.PATH: pooling_route.PoolBody,
    score.PATH: ScoreBody,
    rerank.PATH: RerankBody,
    rerank.COHERE_PATH: CohereRerankBody,
}
POOLING_BODIES: Mapping[PoolingTask, dict[str, type[Body]]] = {
    "embed": {embeddings.PATH: embeddings.EmbeddingBody} | SHARED_BODIES,
    "classify": {classify.PATH: ClassifyBody} | SHARED_BODIES,
    "token_embed": SHARED_BODIES,
    "token_classify": {pooling_route.PATH: pooling_route.PoolBody},
}
COUNTS_OF_LOGPROBS = ("logprobs", "top_logprobs", "prompt_logprobs")
LONGEST_ANSWER = ("max_tokens", "max_completion_tokens")

router = APIRouter()


@router.get("/v1/capabilities")
async def capabilities(
    request: Request,
    service: Annotated[Service, Depends(get_service)],
    model: Annotated[str | None, Query(description="a model's name")] = None,
) -> dict[str, Any]:
    """Lists fields, ranges, defaults and interactions of a model, and the server's routes."""
    served = await service.model(model)
    info, config = served.llm.info, served.llm.config
    return {
        "object": "capabilities",
        "model": served.name,
        "max_model_len": info.max_model_len,
        "vocab_size": info.vocab_size,
        "max_logprobs": config.model.get_max_logprobs(info.vocab_size),
        "block_size": BLOCK_SIZE if config.cache.kv_cache else None,
        "kv_events": _kv_events(config),
        "kv_pool": pool_name(config.to_options().get(store_option(config))),
        "features": _features(served, service),
        "fields": list(_fields(served)),
        "routes": _routes(request.app),
    }


def _kv_events(config: EngineConfig) -> dict[str, Any] | None:
    """Returns the addresses of KV cache events, for routers; None if they are not published."""
    events = parse_events_config(config.cache.kv_events_config)
    if not events.publishes:
        return None
    engines = range(config.fleet.data_parallel_size)
    replay = events.replay_endpoint
    return {
        "endpoints": [offset_endpoint(events.endpoint, engine) for engine in engines],
        "replay_endpoints": [offset_endpoint(replay, engine) for engine in engines]
        if replay is not None
        else [],
        "topic": events.topic,
        "is_locked": events.secret is not None,
    }


def pool_name(address: str | None) -> str:
    """Returns an identifier of the store that servers share, for routers; "" without one."""
    return "" if address is None else blake2b(address.encode(), digest_size=8).hexdigest()


def _fields(model: ServedModel) -> Iterator[dict[str, Any]]:
    """Yields each field once with its paths. A field whose meaning differs between paths is yielded
    once per meaning.
    """
    pools = model.llm.pools
    defaults = {} if pools else msgspec.structs.asdict(model.llm.get_default_chat_params())
    rows: dict[str, list[dict[str, Any]]] = {}
    for path, kind in (POOLING_BODIES[pools] if pools else BODIES).items():
        for name, row in describe_fields(kind).items():
            row = _fit_to_model(row, model, defaults)
            if name in LONGEST_ANSWER and path == completions.PATH:
                row["default"] = completions.DEFAULT_MAX_TOKENS
            elif name in LONGEST_ANSWER and defaults:
                row["default"] = defaults["max_tokens"]
            alike = [known for known in rows.setdefault(name, []) if known | {"paths": 0} == row]
            if alike:
                alike[0]["paths"].append(path)
            else:
                rows[name].append(row | {"paths": [path]})
    for entries in rows.values():
        yield from entries


def _fit_to_model(
    row: dict[str, Any], model: ServedModel, defaults: dict[str, Any]
) -> dict[str, Any]:
    """Returns a field with the model's own defaults and limits."""
    row = row | {"paths": 0}
    name = row["name"]
    if name in SAMPLING_FIELDS:
        row["default"] = defaults[name]
    if name in OPTIONS.beam_search_values:
        row["allowed_in_beam_search"] = list(OPTIONS.beam_search_values[name])
    if name in STRUCTURED_OUTPUT_VALUES:
        row["allowed_with_a_form"] = list(STRUCTURED_OUTPUT_VALUES[name])
    if name in OPTIONS.greedy_values:
        row["allowed_at_temperature_0"] = [OPTIONS.greedy_values[name]]
    if name in COUNTS_OF_LOGPROBS and row["type"] == "integer":
        llm = model.llm
        row["max"] = llm.config.model.get_max_logprobs(llm.info.vocab_size)
    if name in LONGEST_ANSWER:
        row["max"] = model.llm.info.max_model_len - 1
    return row


def _features(model: ServedModel, service: Service) -> dict[str, Any]:
    tokenizer = model.tokenizer
    reasoning = model.formats.reasoning
    variables = frozenset() if tokenizer is None else tokenizer.template_variables
    return {
        "text": tokenizer is not None,
        "chat": tokenizer is not None and tokenizer.has_chat_template,
        "infill": None if tokenizer is None else tokenizer.infill_format,
        "template_variables": sorted(variables),
        "request_chat_template": service.settings.trust_request_chat_template,
        "beam_search": model.llm.pools is None,
        "tools": tokenizer is not None and tokenizer.has_chat_template,
        "tool_call_format": model.formats.tools.name,
        "reasoning_format": None if reasoning is None else reasoning.name,
        "structured_outputs": tokenizer is not None and model.llm.pools is None,
        "logits_processors": [entry.name for entry in model.llm.config.sampler.processors],
        "images": "image" in model.llm.media,
        "audio": "speech" in model.llm.media,
        "audio_input": "audio" in model.llm.media,
        "priority": model.llm.config.scheduler.scheduling_policy == "priority",
    }


def _routes(app: FastAPI) -> list[str]:
    paths = app.openapi()["paths"]
    return [f"{method.upper()} {path}" for path, methods in paths.items() for method in methods]
