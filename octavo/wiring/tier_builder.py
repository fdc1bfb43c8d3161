"""Interface by which an extension builds the lower tiers of the prefix cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from octavo.checkpoint.ports import Checkpoint
from octavo.config.engine_config import EngineConfig
from octavo.engine.kv.kv_connector import Tiers
from octavo.engine.protocol.kv_messages import TransferFacts
from octavo.engine.protocol.ports import ConnectorWorker
from octavo.executor.kv import KvLayout
from octavo.program.program import CacheGroup
from octavo.worker.loaded_model import LoadedModel, MakeConnector
from octavo.worker.ranks.start import SharedSlots


@dataclass(frozen=True, slots=True)
class BuiltTiers:
    """Lower tiers of the prefix cache; empty if the options disable them."""

    tiers: Tiers | None = None
    """Settings of the scheduler half."""
    worker: ConnectorWorker | None = None
    """Worker half."""
    cache_facts: dict[str, str] = field(default_factory=dict)
    """Everything that the bytes of stored blocks depend on, by name; {} without a directory."""
    facts: TransferFacts | None = None
    """Facts that engines compare when they connect; None without KV transfer."""
    sharing: SharedSlots | None = None
    """Includes other ranks in the worker half; None if they take no part."""


class TierBuilder(ABC):
    """Builds tiers that replace host memory and files. `groups` are the unsharded model's cache
    groups.
    """

    @abstractmethod
    def check(
        self, config: EngineConfig, layouts: Sequence[KvLayout], groups: Sequence[CacheGroup]
    ) -> None:
        """Raises ConfigError if the options do not support blocks with these layouts."""

    @abstractmethod
    def build(
        self, checkpoint: Checkpoint, loaded: LoadedModel, groups: Sequence[CacheGroup]
    ) -> BuiltTiers:
        """Builds the tiers on rank 0."""

    def build_on_rank(self, groups: Sequence[CacheGroup], rank: int) -> MakeConnector | None:
        """Returns the factory of another rank's worker half; None if ranks take no part in it."""
        return None
