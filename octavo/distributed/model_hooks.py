"""Selects the builder of the lower cache tiers according to the options."""

from __future__ import annotations

from octavo.config.engine_config import EngineConfig
from octavo.distributed.options import PoolOptions, TransferOptions
from octavo.wiring.model_hooks import ModelHooks
from octavo.wiring.tier_builder import TierBuilder


class DistributedModelHooks(ModelHooks):
    def tier_builder(self, config: EngineConfig) -> TierBuilder | None:
        if config.of(TransferOptions).kv_transfer is not None:
            from octavo.distributed.transfer_tiers import TransferTierBuilder  # loads ZeroMQ

            return TransferTierBuilder()
        if config.of(PoolOptions).kv_pool is not None:
            from octavo.distributed.pool_tiers import PoolTierBuilder

            return PoolTierBuilder()
        return None
