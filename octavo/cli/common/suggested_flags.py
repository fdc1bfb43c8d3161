"""Flags suggested by `octavo plan`: the cheapest changes with which a model fits into memory.

Tries shorter contexts, smaller steps and quantization at load.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from octavo.api.errors import ConfigError
from octavo.cli.common.flags import format_flags

if TYPE_CHECKING:
    from octavo.wiring.plan import ModelPlan
    from octavo.worker.capacity import Capacity

TYPICAL_CONTEXT = 2048
"""Request length in tokens for suggesting --max-num-seqs and for the memory split."""

LEAST_CONTEXT = 64
"""Shortest suggested context, in tokens."""

SMALL_STEPS = (512, 128)
"""Suggested step sizes in tokens, if activations are too large with the default."""


def suggested_flags(
    model_plan: ModelPlan, memory_bytes: int, given: Mapping[str, Any]
) -> list[str]:
    """Returns flags with which the model fits, including the options `given`; [] if there are none.

    A suggested value replaces a given one. The cheapest changes are tried first: a shorter context,
    smaller steps, quantization at load.
    """
    suggested = suggested_options(model_plan, memory_bytes)
    if not suggested:
        return []
    if (limit := given.get("max_num_seqs")) is not None:
        suggested["max_num_seqs"] = min(limit, suggested["max_num_seqs"])
    return format_flags(
        suggested | {key: value for key, value in given.items() if key not in suggested}
    )


def suggested_options(model_plan: ModelPlan, memory_bytes: int) -> dict[str, Any]:
    """Returns the suggested options; {} if none make the model fit."""
    tries = list(_tries(model_plan, memory_bytes))
    typical_len = min(TYPICAL_CONTEXT, model_plan.capacity.demand.max_model_len)
    contexts = [_get_max_context(tried.capacity) for tried in tries]
    best = next(
        (index for index, context in enumerate(contexts) if context >= typical_len),
        contexts.index(max(contexts)),
    )
    if contexts[best] < LEAST_CONTEXT:
        return {}
    scheduler, quantization = tries[best].config.scheduler, tries[best].config.model.quantization
    options: dict[str, Any] = {} if quantization is None else {"quantization": quantization}
    if scheduler != model_plan.config.scheduler:
        options["max_num_batched_tokens"] = scheduler.max_num_batched_tokens
    return options | _memory_options(tries[best], contexts[best])


def _get_max_context(capacity: Capacity) -> int:
    """Returns the longest context that fits; 0 if the requested KV cache does not fit."""
    return (
        0
        if capacity.wanted_kv_bytes is not None and capacity.shortfall_bytes
        else capacity.max_context()
    )


def _tries(model_plan: ModelPlan, memory_bytes: int) -> Iterator[ModelPlan]:
    """Yields plans to try: the given one, one with smaller steps, and both with quantized weights,
    unless the weights are already quantized.
    """
    from octavo.api.errors import UnsupportedModel
    from octavo.wiring.plan import plan_model

    model, scheduler = model_plan.config.model, model_plan.config.scheduler
    quantizations: list[Any] = [model.quantization]
    if quantizations == [None] and model_plan.footprint.code not in ("u4", "u8"):
        quantizations += ["int8", "int4"]
    steps = [
        scheduler.max_num_batched_tokens,
        *(size for size in SMALL_STEPS if size < scheduler.max_num_batched_tokens),
    ]
    for quantization in quantizations:
        for size in steps if scheduler.enable_chunked_prefill else steps[:1]:
            config = replace(
                model_plan.config,
                model=replace(model, quantization=quantization),
                scheduler=replace(scheduler, max_num_batched_tokens=size),
            )
            try:
                yield plan_model(config, memory_bytes=memory_bytes)
            except (ConfigError, UnsupportedModel):  # not supported by the model
                break


def _memory_options(model_plan: ModelPlan, context: int) -> dict[str, Any]:
    """Returns the options for a context: its length, the KV cache and the number of requests."""
    capacity = model_plan.capacity
    options: dict[str, Any] = {}
    if context != model_plan.info.max_context_tokens:
        options["max_model_len"] = context // 16 * 16
    if capacity.wanted_kv_bytes is None and model_plan.generates:
        options["kv_cache_memory_bytes"] = capacity.kv_bytes >> 20 << 20
    requests = capacity.max_requests(min(TYPICAL_CONTEXT, context))
    return options | {"max_num_seqs": max(1, min(requests, 256))}
