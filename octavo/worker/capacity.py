"""Estimates an engine's memory and how many requests fit, before anything is loaded.

Computes from sizes only: bytes of weights, of a step's buffers, of KV blocks. `memory.py` decides
the size of the KV cache.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.api.errors import InsufficientMemory
from octavo.config.engine_config import EngineConfig
from octavo.config.sizes import format_bytes
from octavo.engine.protocol.kv_cache_spec import KvDemand
from octavo.executor.base import Footprint
from octavo.executor.kv import BLOCK_SIZE
from octavo.worker.kv_hooks import kv_planner
from octavo.worker.memory import (
    SAFE_SHARE,
    GroupSize,
    KvBudget,
    KvPlanner,
    get_kv_demand,
    group_sizes,
    plan_kv,
)

PROCESS_BYTES = 192 << 20
"""Bytes of the two processes without the model: 75 MiB with a vocabulary of 300 tokens, 170 MiB
with a vocabulary of 260,000 (November 2026).
"""

SPARE = 0.1
"""Fraction of the remaining memory that is kept free as a reserve."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """Memory of an engine, by use."""

    memory_bytes: int
    """Total memory that the engine may use."""
    weight_bytes: int
    step_bytes: int
    groups: tuple[GroupSize, ...]
    demand: KvDemand
    wanted_kv_bytes: int | None = None
    """Bytes of the KV cache set by options; None if not set."""
    planner: KvPlanner | None = None
    """Plans a KV cache that is partly in a file; None if all of it is in memory."""
    share: float = SAFE_SHARE
    """Maximum fraction of the free memory for the KV cache if the options set no size."""

    @property
    def fixed_bytes(self) -> int:
        """Bytes used besides the KV cache."""
        return self.weight_bytes + self.step_bytes + PROCESS_BYTES

    @property
    def left_bytes(self) -> int:
        """Bytes left for the KV cache; negative if the weights do not fit."""
        return self.memory_bytes - self.fixed_bytes

    @property
    def least_kv_bytes(self) -> int:
        """Bytes set for the KV cache by options, else the bytes of one request of maximum context
        length.
        """
        least = sum(group.block_bytes * group.least_blocks(self.demand) for group in self.groups)
        return least if self.wanted_kv_bytes is None else self.wanted_kv_bytes

    @property
    def shortfall_bytes(self) -> int:
        """Missing bytes; 0 if the engine fits."""
        return max(0, self.least_kv_bytes - self.left_bytes)

    @property
    def kv_bytes(self) -> int:
        """Bytes for the KV cache: as set by options, else the remaining bytes minus a reserve."""
        if self.wanted_kv_bytes is not None:
            return self.wanted_kv_bytes
        return max(0, int(self.left_bytes * (1 - SPARE)))

    @property
    def kv_token_bytes(self) -> float:
        """Bytes of a token in all groups except recurrent states, before any window releases
        blocks.
        """
        return (
            sum(group.stored_bytes for group in self.groups if not group.spec.is_rewritten)
            / BLOCK_SIZE
        )

    @property
    def kv_tokens(self) -> int:
        """Number of tokens whose K and V fit, in memory or in a file."""
        if self.planner is not None:
            return self.budget().num_tokens
        return round(self.kv_bytes / self.kv_token_bytes)

    @property
    def state_bytes(self) -> int:
        """Bytes of a request's recurrent states and of one checkpoint of them; 0 without states."""
        return sum(group.block_bytes for group in self.groups if group.spec.is_rewritten)

    def request_bytes(self, num_tokens: int) -> int:
        """Returns the KV bytes of one request of `num_tokens` tokens, prompt and output."""
        return sum(
            group.stored_bytes * group.spec.blocks_held(num_tokens, BLOCK_SIZE)
            for group in self.groups
        )

    def max_requests(self, num_tokens: int) -> int:
        """Returns the number of requests of `num_tokens` tokens each that fit at once; without KV,
        the maximum number of running requests.
        """
        if self.planner is not None:
            return self.kv_tokens // num_tokens
        request_bytes = self.request_bytes(num_tokens)
        return self.kv_bytes // request_bytes if request_bytes else self.demand.max_num_seqs

    def max_context(self) -> int:
        """Returns the longest context that one request may have, at most `demand.max_model_len`; 0
        if not even one block fits.
        """
        low, high = 0, self.demand.max_model_len
        while low < high:
            middle = (low + high + 1) // 2
            if self.max_requests(middle):
                low = middle
            else:
                high = middle - 1
        return low

    def check(self, name: str) -> None:
        """Raises ConfigError with the missing bytes if the model does not fit."""
        if self.shortfall_bytes:
            kv = f"KV cache {format_bytes(self.least_kv_bytes)}"
            if self.wanted_kv_bytes is None:
                kv += f" for one request of {self.demand.max_model_len:,} tokens"
            parts = (
                f"weights {format_bytes(self.weight_bytes)}, a step"
                f" {format_bytes(self.step_bytes)}, {kv}"
            )
            needed = format_bytes(self.fixed_bytes + self.least_kv_bytes)
            raise InsufficientMemory(
                f"{name} does not fit: requires {needed} ({parts});"
                f" {format_bytes(self.memory_bytes)} are free,"
                f" {format_bytes(self.shortfall_bytes)} are missing",
                hint="run `octavo plan` with the same options to see what fits",
            )
        self.budget()

    def budget(self) -> KvBudget:
        """Plans the KV cache in the same way as the engine."""
        return plan_kv(
            self.groups,
            self.demand,
            planner=self.planner,
            wanted_bytes=self.wanted_kv_bytes,
            available_bytes=self.left_bytes,
            share=self.share,
        )


def get_capacity(
    config: EngineConfig,
    footprint: Footprint,
    memory_bytes: int,
    *,
    share: float = SAFE_SHARE,
) -> Capacity:
    """Returns the use of `memory_bytes` by an engine with these options."""
    return Capacity(
        memory_bytes=memory_bytes,
        weight_bytes=footprint.resident_bytes,
        step_bytes=footprint.step_bytes,
        groups=tuple(group_sizes(config, footprint.kv_layouts)),
        demand=get_kv_demand(config),
        wanted_kv_bytes=config.cache.kv_cache_memory_bytes,
        planner=kv_planner(config),
        share=share,
    )
