"""Builds the prefix cache tier in a store that several engines share."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.checkpoint.ports import Checkpoint
from octavo.config.engine_config import EngineConfig
from octavo.config.paths import open_state_home
from octavo.distributed.options import PoolOptions
from octavo.distributed.pool.mooncake_pool import MooncakePool, check_pool
from octavo.distributed.pool.pool_worker import PoolWorker
from octavo.engine.kv.kv_connector import Tiers
from octavo.executor.kv import KvLayout
from octavo.program.program import CacheGroup
from octavo.wiring.tier_builder import BuiltTiers, TierBuilder
from octavo.wiring.tiers import count_slots, fingerprint_parts, stored_weight_files
from octavo.worker.cache_engine import HostShape
from octavo.worker.kv_connectors.fingerprint import fingerprint
from octavo.worker.loaded_model import LoadedModel


class PoolTierBuilder(TierBuilder):
    def check(
        self, config: EngineConfig, layouts: Sequence[KvLayout], groups: Sequence[CacheGroup]
    ) -> None:
        count_slots(config.cache, sum(layout.block_bytes for layout in layouts), has_more=True)
        check_pool(config.of(PoolOptions).kv_pool or "")

    def build(
        self, checkpoint: Checkpoint, loaded: LoadedModel, groups: Sequence[CacheGroup]
    ) -> BuiltTiers:
        options = loaded.config.of(PoolOptions)
        block_bytes = [layout.block_bytes for layout in loaded.layouts]
        num_slots = count_slots(loaded.config.cache, sum(block_bytes), has_more=True)
        pool = MooncakePool(
            check_pool(options.kv_pool or ""),
            lends_bytes=options.kv_pool_lends,
            num_replicas=options.kv_pool_replicas,
        )
        parts = fingerprint_parts(checkpoint, loaded)
        files = stored_weight_files(checkpoint, loaded)
        name = fingerprint(parts, files, cache=open_state_home())
        worker = PoolWorker([HostShape(num_slots, size) for size in block_bytes], pool, name)
        # Pinning only asks the store to evict a block late; the store may still evict it.
        max_pinned_bytes = num_slots * sum(block_bytes)
        return BuiltTiers(Tiers(block_bytes, num_slots, True, max_pinned_bytes, asks=True), worker)
