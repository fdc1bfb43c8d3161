"""Builds a Scheduler and its collaborators from the options, for an engine, a simulation or a
replay.

Independent of the model: cache groups and context length are arguments.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from octavo.config.cache_options import CacheOptions
from octavo.config.checks import tenant_weights
from octavo.config.scheduler_options import SchedulerOptions
from octavo.engine.kv.block_manager import BlockManager
from octavo.engine.kv.block_pool import BlockGroup
from octavo.engine.kv.kv_connector import KVConnector, Tiers
from octavo.engine.protocol.kv_events import parse_events_config
from octavo.engine.protocol.original_context import ONE_CONTEXT, OriginalContext
from octavo.engine.protocol.prompt_limits import PromptLimits
from octavo.engine.requests.stop_strings import MakeStopTexts
from octavo.engine.scheduler.batching import build_batching
from octavo.engine.scheduler.kv_allocator import KVAllocator
from octavo.engine.scheduler.request_queues import FairQueue, WaitingQueue
from octavo.engine.scheduler.scheduler import Scheduler
from octavo.engine.scheduler.step_builder import MultiStepPolicy, StepLimits
from octavo.engine.speculation.speculation import SpeculationOptions


def build_scheduler(
    options: SchedulerOptions,
    cache: CacheOptions,
    groups: Sequence[BlockGroup],
    *,
    block_size: int,
    max_model_len: int,
    tiers: Tiers | None = None,
    stop_texts: MakeStopTexts | None = None,
    num_adapter_slots: int = 0,
    can_resample: bool = True,
    caches_generated: bool = True,
    num_micro_batches: int = 1,
    original: OriginalContext = ONE_CONTEXT,
) -> Scheduler:
    """Returns a scheduler without requests. `stop_texts`: finds the stop strings of beam searches,
    which the frontend cannot detect. `can_resample`: whether the backend can resample rows.
    `caches_generated`: whether K and V of generated tokens equal those of the same tokens in a
    prompt. `original`: the model's original context (LongRoPE).
    """
    blocks = BlockManager(
        groups,
        block_size=block_size,
        enable_prefix_caching=cache.enable_prefix_caching and cache.kv_cache,
        shares_blocks=shares_blocks(cache),
        max_step_tokens=options.max_num_batched_tokens,
        connector=KVConnector(tiers) if tiers is not None and tiers.num_slots else None,
        logs_events=parse_events_config(cache.kv_events_config).enable_kv_cache_events,
        original=original,
        choice=None if tiers is None else tiers.choice,
    )
    return Scheduler(
        blocks,
        limits=StepLimits(
            options.max_num_batched_tokens,
            options.max_num_seqs,
            max_chunk=_max_chunk(options),
            itl_target_s=None if options.itl_target_ms is None else options.itl_target_ms / 1000,
            keeps_kv=cache.kv_cache,
            num_micro_batches=num_micro_batches,
        ),
        prompt_limits=prompt_limits(
            options,
            cache,
            max_model_len=max_model_len,
            kv_capacity_tokens=blocks.capacity_tokens,
            block_size=block_size,
        ),
        waiting=build_waiting_queue(options),
        batching=build_batching(
            options.batching,
            max_num_seqs=options.max_num_seqs,
            window_s=options.batch_window_ms / 1000,
            delay_factor=options.scheduler_delay_factor,
        ),
        kv_allocator=KVAllocator(
            blocks,
            watermark_blocks=math.ceil(
                options.watermark * min(group.num_blocks for group in groups)
            ),
            caches_generated=caches_generated,
        ),
        preemption_mode=options.preemption_mode,
        multi_step_policy=MultiStepPolicy(blocks, options.num_scheduler_steps or 1),
        drafting=_drafting(options, can_resample=can_resample),
        stop_texts=stop_texts,
        num_adapter_slots=num_adapter_slots,
        media_cache_tokens=cache.media_cache_tokens,
    )


def _drafting(options: SchedulerOptions, *, can_resample: bool) -> SpeculationOptions | None:
    if options.spec_method is None or options.spec_method == "none":
        return None
    return SpeculationOptions(
        options.spec_method,
        options.spec_tokens,
        can_resample=can_resample,
        history_bytes=options.spec_history,
        tree_width=options.spec_tree_width,
    )


def _max_chunk(options: SchedulerOptions) -> int | None:
    if not options.enable_chunked_prefill:
        return None
    return options.long_prefill_token_threshold or options.max_num_batched_tokens


def prompt_limits(
    options: SchedulerOptions,
    cache: CacheOptions,
    *,
    max_model_len: int,
    kv_capacity_tokens: int,
    block_size: int,
) -> PromptLimits:
    return PromptLimits(
        max_prompt_len=options.max_prompt_len,
        max_model_len=max_model_len,
        kv_capacity_tokens=kv_capacity_tokens,
        max_whole_prompt=None if options.enable_chunked_prefill else options.max_num_batched_tokens,
        max_num_seqs=options.max_num_seqs,
        block_size=block_size,
        shares_blocks=shares_blocks(cache),
    )


def shares_blocks(cache: CacheOptions) -> bool:
    """Returns whether requests may share KV blocks."""
    return cache.kv_cache and cache.kv_layout == "paged"


def build_waiting_queue(options: SchedulerOptions) -> WaitingQueue:
    if options.scheduling_policy == "fair":
        return FairQueue(
            weights=tenant_weights(options), max_running=options.max_num_seqs_per_tenant
        )
    return WaitingQueue()
